"""Rows that follow measured pass times: a slow GPU gets fewer, and what a folder must hold."""

import json

import pytest

from megatron_vp.cost.balance.measured_rows import next_rows, read_run, refilled
from megatron_vp.errors import UserError
from megatron_vp.schedule import PassCosts, PassKind, VocabMethod, generate, simulate
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.trace.partition import Partition
from megatron_vp.trace.rank_files import RankTrace, TracedSpan, path_of

VOCAB = 131072
TWO = VocabMethod.VOCAB_2
EVEN = Partition(None, (VOCAB // 4,) * 4)


def seconds(slowness, rows, layers=3.0):
    """F, B and W of `layers`, S and T by rows; an even share of four takes one layer's time."""
    work = 4 * rows / VOCAB
    return {
        "F": slowness * layers / 3,
        "B": slowness * layers * 2 / 3,
        "S": slowness * work / 2,
        "T": slowness * work / 2,
    }


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_slow_rank_gets_fewer_rows_until_all_take_the_same_time(ranks):
    slowness = [1.0] * ranks
    slowness[1] = 1.05
    took = [seconds(slow, VOCAB // ranks, layers=1.0) for slow in slowness]
    found = refilled(Partition(None, (VOCAB // ranks,) * ranks), took)
    assert sum(found.rows) == VOCAB and found.rows[1] == min(found.rows) and all(rows % 128 == 0 for rows in found.rows)
    after = [sum(seconds(slow, rows, 1.0).values()) for slow, rows in zip(slowness, found.rows, strict=True)]
    equal = ranks * (1 + 4 / ranks) / sum(1 / slow for slow in slowness)  # as fast together
    assert max(after) <= 1.005 * equal
    before = max(sum(each.values()) for each in took)
    assert found.gain == pytest.approx(before / max(after))


def test_a_rank_without_rows_is_as_fast_with_rows_as_with_layers():
    layers, rows = (3, 3, 3, 1), (65536, 65536, 0, 0)
    partition = Partition(layers, rows)
    took = [seconds(slow, own, n) for slow, own, n in zip((1, 1, 1, 1.5), rows, layers, strict=True)]
    found = refilled(partition, took)
    assert found.layers == layers and found.rows[2] < found.rows[3]
    after = [sum(seconds(s, r, n).values()) for s, r, n in zip((1, 1, 1, 1.5), found.rows, layers, strict=True)]
    assert max(after) - min(after) < 0.01 and found.gain == pytest.approx(5 / max(after))


def test_rows_stay_within_memory():
    found = refilled(EVEN, [seconds(1, VOCAB // 4)] * 4, most=[16384, VOCAB, VOCAB, VOCAB])
    assert found.rows[0] == 16384
    with pytest.raises(UserError, match="does not fit into the memory"):
        refilled(EVEN, [seconds(1, VOCAB // 4)] * 4, most=[128] * 4)


def write_reports(folder, ranks=4, **changes):
    for rank in range(ranks):
        each = {kind: 1e3 * took * 5 for kind, took in seconds(1 + 0.05 * (rank == 2), VOCAB // ranks).items()}
        document = {
            "pipeline_rank": rank,
            "microbatches": 5,
            "pass_milliseconds_by_iteration": [{kind: 9 * took for kind, took in each.items()}, each, each],
            "layers": None,
            "vocab_rows": [VOCAB // ranks] * ranks,
            "tensor": 1,
        }
        (folder / f"rank_{rank}.json").write_text(json.dumps(document | changes))


def test_rank_reports_are_read_without_their_first_iteration(tmp_path):
    write_reports(tmp_path)
    run = read_run(tmp_path)
    assert run.partition == Partition(None, (VOCAB // 4,) * 4)
    assert run.seconds[1] == pytest.approx(seconds(1, VOCAB // 4))
    found = next_rows(tmp_path, 4, 1, VOCAB, None, "", lambda partition: None)
    assert found.rows[2] == min(found.rows) < VOCAB // 4


def test_traces_are_read(tmp_path):
    schedule = generate("1f1b", 4, 3, vocab=TWO)
    timeline = simulate(schedule, PassCosts(F=2, B=3, W=1, S=0.5, T=0.25))
    partition = Partition((1, 2, 3, 4), (VOCAB // 4,) * 4, 2)
    for rank, passes in enumerate(schedule.ranks):
        spans = tuple(
            TracedSpan(1, Lane.COMPUTE, str(step), step.kind, start, end)
            for step, (start, end) in zip(passes, timeline.spans[rank], strict=True)
        )
        trace = RankTrace("7", rank, "1f1b", "vocab-2", schedule.placement.stage_of, {1: 3}, 0.0, spans, partition)
        path_of(tmp_path, rank).write_text(trace.to_json())
    run = read_run(tmp_path)
    assert run.partition == partition
    assert run.seconds[3] == pytest.approx({"F": 2e-3, "B": 4e-3, "S": 5e-4, "T": 2.5e-4, "IF": 5e-5, "IB": 5e-5})


def test_folders_of_something_else_are_refused_in_a_line(tmp_path):
    with pytest.raises(UserError, match=r"holds no rank_\*.json"):
        read_run(tmp_path)
    write_reports(tmp_path)
    (tmp_path / "rank_3.json").unlink()
    with pytest.raises(UserError, match="has the files of 3 ranks, and its run had 4"):
        read_run(tmp_path)
    write_reports(tmp_path, vocab_rows=None)
    with pytest.raises(UserError, match="is of a run without vocabulary shards"):
        read_run(tmp_path)
    (tmp_path / "rank_0.json").write_text("{}")
    with pytest.raises(UserError, match="neither a rank report nor a trace"):
        read_run(tmp_path)
    (tmp_path / "rank_0.json").write_text("[")
    with pytest.raises(UserError, match="is no JSON"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no times of vocabulary passes"):
        refilled(EVEN, [{str(PassKind.F): 1.0}] * 4)
