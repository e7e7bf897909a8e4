"""Test rows chosen from measured pass times: a slow GPU gets fewer rows, and incomplete folders are refused."""

import json
import math
import re
from pathlib import Path

import pytest

from megatron_vp.cost.planning.measured_rows import MeasuredJob, next_rows, read_run, refilled
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod
from megatron_vp.trace.partition import Partition
from tests.cost.measured_folders import write_reports

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
    with pytest.raises(UserError, match="does not fit into the combined memory"):
        refilled(EVEN, [seconds(1, VOCAB // 4)] * 4, most=[128] * 4)


def reports(folder, ranks=4, **changes):
    times = [
        {kind: 1e3 * took for kind, took in seconds(1 + 0.05 * (rank == 2), VOCAB // ranks).items()}
        for rank in range(ranks)
    ]
    return write_reports(folder, times, [VOCAB // ranks] * ranks, **changes)


JOB = MeasuredJob(4, 1, VOCAB, "1f1b", "vocab-2", {"num_layers": 12, "hidden_size": 64})
SIZES = {"num_layers": 12, "hidden_size": 64, "seq_length": 128, "padded_vocab_size": VOCAB}


def test_rank_reports_are_read_without_their_first_iteration(tmp_path):
    run = read_run(reports(tmp_path))
    assert run.rows == (VOCAB // 4,) * 4
    assert run.seconds[1] == pytest.approx(seconds(1, VOCAB // 4))
    found = next_rows(tmp_path, JOB, lambda partition: None)
    assert found.rows[2] == min(found.rows) < VOCAB // 4


def change(folder, rank, **changes):
    path = folder / f"rank_{rank}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def times(folder, rank, edit):
    """Let `edit` change the rank's times of every iteration."""
    iterations = json.loads((folder / f"rank_{rank}.json").read_text())["pass_milliseconds_by_iteration"]
    for each in iterations:
        edit(each)
    change(folder, rank, pass_milliseconds_by_iteration=iterations)


def of_all(folder, **changes):
    for rank in range(4):
        change(folder, rank, **changes)


def fewer(folder, rank, count):
    document = json.loads((folder / f"rank_{rank}.json").read_text())
    names = ("microbatches_by_iteration", "pass_milliseconds_by_iteration", "iteration_milliseconds")
    change(folder, rank, **{name: document[name][:count] for name in names})


OTHER_FILE = r"rank_\d.json is truncated, or is not a file that --rank-report"
WRONG = {
    "a list": (lambda f: (f / "rank_0.json").write_text("[]"), OTHER_FILE),
    "not a number": (lambda f: times(f, 1, lambda t: t.update(F=math.nan)), OTHER_FILE),
    "negative": (lambda f: times(f, 0, lambda t: t.update(F=-4.0)), OTHER_FILE),
    "text": (lambda f: times(f, 0, lambda t: t.update(B="8")), OTHER_FILE),
    "no microbatches": (lambda f: change(f, 1, microbatches_by_iteration=[0] * 7), OTHER_FILE),
    "counts and times": (lambda f: change(f, 1, microbatches_by_iteration=[5] * 6), OTHER_FILE),
    "no forwards": (
        lambda f: times(f, 0, lambda t: t.pop("F")),
        "rank_0.json has an iteration without times of F pass",
    ),
    "no time": (
        lambda f: times(f, 0, lambda t: t.update(T=0.0)),
        "rank_0.json has an iteration without times of T pass",
    ),
    "rows": (lambda f: of_all(f, vocab_rows=[VOCAB // 4] * 3 + [8]), "not add up to the vocabulary size 131"),
    "negative rows": (lambda f: of_all(f, vocab_rows=[VOCAB + 8, -8, 0, 0]), "not add up to the vocabulary size 131"),
    "without rows": (lambda f: of_all(f, vocab_rows=None), "is from a run without vocabulary shards"),
    "much slower": (lambda f: times(f, 1, lambda t: t.update(B=1e5)), "rank_1.json took [0-9.]+ times as long"),
    "runs": (lambda f: change(f, 2, run="another"), "contains files of different runs"),
    "schedules": (lambda f: change(f, 1, schedule="v-half"), "contains files of different runs"),
    "a rank is missing": (
        lambda f: (f / "rank_3.json").unlink(),
        r"3 files, of ranks \[0, 1, 2\], but .* 0 to 3",
    ),
    "too short": (lambda f: [fewer(f, r, 5) for r in range(4)], "has 4 measured iterations, but at least 5 are needed"),
    "no file": (lambda f: [path.unlink() for path in f.iterdir()], r"contains no rank_\*.json"),
    "another schedule": (lambda f: of_all(f, schedule="v-half"), "--pipeline-schedule v-half, but this job has 1f1b"),
    "method": (lambda f: of_all(f, vocab="vocab-1"), "--vocab-parallel-algorithm vocab-1, but this job has vocab-2"),
    "layers": (lambda f: of_all(f, sizes=SIZES | {"num_layers": 16}), "--num-layers 16, but this job has 12"),
    "tensor ranks": (lambda f: of_all(f, tensor=2), "a run with 2 tensor ranks, but this job has 1"),
    "pipeline ranks": (lambda f: reports(f, 8, sizes=SIZES), "a run with 8 pipeline ranks, but this job has 4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_reports_that_are_no_measurement_of_this_job_are_refused_by_name(tmp_path, name):
    reports(tmp_path, sizes=SIZES)
    assert next_rows(tmp_path, JOB, lambda partition: None).rows
    spoil, said = WRONG[name]
    spoil(tmp_path)
    with pytest.raises(UserError, match=said) as refused:
        next_rows(tmp_path, JOB, lambda partition: None)
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)
    assert re.search("measure|give|put|train|look", str(refused.value)), "it says what to do"


REAL = sorted(path.name for path in (Path(__file__).parent / "measured_runs").iterdir())


@pytest.mark.parametrize("name", REAL)
def test_what_real_runs_wrote_is_taken(name):
    folder = Path(__file__).parent / "measured_runs" / name
    run = read_run(folder)
    assert sum(run.rows) == 512
    job = MeasuredJob(2, 1, 512, run.schedule, run.vocab, {"num_layers": 4, "hidden_size": 32, "seq_length": 16})
    assert sum(next_rows(folder, job, lambda partition: None).rows) == 512
