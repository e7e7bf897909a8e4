"""Test --pipeline-trace and --rank-report in training, and the command that reads the traces."""

import json

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import PassKind, generate
from megatron_vp.trace.figures import figures
from megatron_vp.trace.rank_files import read_traces
from megatron_vp.trace.rank_reports import read_reports
from megatron_vp.trace.two_runs import RecordedRun, TwoRuns
from tests.harness.training import tiny_model, train

RANKS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    # Evaluation in between is neither counted nor recorded.
    settings = {"pipeline_model_parallel_size": RANKS, "eval_iters": 1, "eval_interval": 1}
    vocab_parallel = {
        "vocab_parallel": True,
        "pipeline_trace": folder / "trace",
        "pipeline_trace_iterations": "2-6",
        "rank_report": folder / "report",
        "train_iters": 6,
    }
    train(RANKS, tiny_model(**settings, **vocab_parallel))
    plain = {"rank_report": folder / "plain", "pipeline_trace": folder / "plain trace"}
    train(RANKS, tiny_model(**settings, **plain, pipeline_trace_iterations="2-3"))
    whole_layers = {
        "pipeline_schedule": "v-half",
        "pipeline_trace": folder / "whole trace",
        "pipeline_trace_iterations": "2",
        "rank_report": folder / "whole",
    }
    train(RANKS, tiny_model(**settings, **whole_layers))
    return folder


def test_the_command_reads_what_training_recorded(folders):
    merged = folders / "merged.json"
    result = CliRunner().invoke(app, ["trace", str(folders / "trace"), "-o", str(merged)])
    assert result.exit_code == 0, result.output
    assert (
        "schedule 1f1b, vocabulary vocab-2: 2 ranks, 4 microbatches, iterations 2, 3, 4, 5, 6 of the job"
        in result.stdout
    )
    events = json.loads(merged.read_text())["traceEvents"]
    for rank in range(RANKS):
        own = [event for event in events if event["pid"] == rank]
        for iteration in (2, 3):
            passes = sorted(
                event["name"] for event in own if event["args"].get("iteration") == iteration and event["tid"] == 0
            )
            expected = [f"{kind}{m}" for kind in ("F", "B", "S", "T", "IF", "IB") for m in range(4)]
            expected += [f"LOAD:{m}" for m in range(4)]  # both ranks read data
            assert passes == sorted(expected + [f"LOSS:{m}" for m in range(4)] * (rank == RANKS - 1))


def test_megatrons_own_schedule_is_traced(folders):
    traces, expected = read_traces(folders / "plain trace"), generate("1f1b", RANKS, 4)
    for trace, order in zip(traces, expected.ranks, strict=True):
        assert (trace.schedule, trace.vocab, trace.placement) == ("1f1b", "none", expected.placement.stage_of)
        for iteration in (2, 3):
            spans = [each for each in trace.spans if each.iteration == iteration and each.category in PassKind]
            assert [span.name for span in spans] == list(map(str, order))
    found = figures(traces)
    assert all(0 < rank.busy < found.measured and rank.vocabulary == 0 for rank in found.ranks)


def test_two_runs_are_compared_by_the_reports_that_training_wrote(folders):
    plain, split = (RecordedRun(tuple(read_reports(folders / name)), {1: 5.0, 2: 4.0}) for name in ("plain", "report"))
    assert all(0 < rank.busy_seconds < rank.iteration_seconds for run in (plain, split) for rank in run.ranks)
    found = TwoRuns(plain, split).document()
    assert sum(found["vocabulary_parallel"]["parameters"]) == sum(found["plain"]["parameters"])
    assert found["vocabulary_parallel"]["peak_microbatches_in_flight"] == [RANKS + 1, RANKS]
    with pytest.raises(UserError, match="is not a file that --rank-report"):
        read_reports(folders / "trace")


def reports(folder):
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


def test_the_report_counts_every_iteration_beside_the_trace(folders):
    for rank, report in enumerate(reports(folders / "report")):
        assert report["iterations"] == len(report["iteration_milliseconds"]) == 6
        assert report["microbatches"] == 4 and report["microbatches_by_iteration"] == [4] * 6
        assert (report["schedule"], report["vocab"], report["sizes"]["num_layers"]) == ("1f1b", "vocab-2", 4)
        assert report["peak_microbatches_in_flight"] == RANKS - rank + 1
        assert set(report["pass_milliseconds"]) == {"F", "B", "S", "T", "IF", "IB"}
        assert 0 < sum(report["pass_milliseconds"].values()) < sum(report["iteration_milliseconds"])


def test_plain_megatron_is_reported_alike(folders):
    for rank, report in enumerate(reports(folders / "plain")):
        assert report["iterations"] == len(report["iteration_milliseconds"]) == 3
        assert report["peak_microbatches_in_flight"] == RANKS - rank
        assert set(report["pass_milliseconds"]) == {"F", "B"}
        assert 0 < sum(report["pass_milliseconds"].values()) < sum(report["iteration_milliseconds"])


@pytest.mark.parametrize("rank", range(RANKS))
def test_whole_layers_read_data_on_both_ends_of_a_v(folders, rank):
    events = json.loads((folders / "whole trace" / f"rank_{rank}.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "load"] == [f"LOAD:{m}" for m in range(4)]


def test_a_schedule_with_whole_vocabulary_layers_is_traced_and_reported_alike(folders):
    result = CliRunner().invoke(app, ["trace", str(folders / "whole trace")])
    assert result.exit_code == 0, result.output
    assert "schedule v-half, vocabulary none: 2 ranks, 4 microbatches, iterations 2 of the job" in result.stdout
    for report in reports(folders / "whole"):
        assert report["iterations"] == 3 and report["peak_microbatches_in_flight"] <= 2
        assert set(report["pass_milliseconds"]) == {"F", "B", "W"}
