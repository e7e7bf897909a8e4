"""Test `megatron-vp report` on runs with known results, and one-line errors for runs that cannot be compared."""

import json

import pytest

from megatron_vp.cli.app import main
from megatron_vp.errors import UserError
from megatron_vp.trace.two_runs import read_losses, read_two_runs

GIB = 2**30
MEGATRON = (
    " [2026-11-23 12:00:20] iteration {:8d}/      50 | consumed samples:  16 | lm loss: {} | loss scale: 1.0 |\n"
    " validation loss at iteration {} | lm loss value: 7.282781E+00 | lm loss PPL: 1.455028E+03 | \n"
)
LOSSES = {1: "9.724010E+00", 2: "9.738344E+00", 3: "9.600000E+00"}


def log_of(losses):
    return "starting\n" + "".join(MEGATRON.format(each, loss, each) for each, loss in losses.items())


def write_run(folder, busy, rows=None, losses=LOSSES, peak=None, **changes):
    """Reports of ranks that compute `busy` milliseconds of each iteration's 100, but for the first."""
    folder.mkdir()
    for rank, milliseconds in enumerate(busy):
        each = {"F": 0.25 * milliseconds, "B": 0.75 * milliseconds}
        document = {
            "run": folder.name,
            "pipeline_rank": rank,
            "pipeline_size": len(busy),
            "parameters": 1000 + rank,
            "schedule": "1f1b",
            "vocab": "none" if rows is None else "vocab-2",
            "microbatches_by_iteration": [4, 4, 4],
            "peak_microbatches_in_flight": 2.0 - rank,
            "iteration_milliseconds": [900.0, 90.0, 110.0],
            "pass_milliseconds_by_iteration": [{"F": 400.0, "B": 400.0}, each, each],
            "memory_bytes": {"parameters": 4000} | ({} if peak is None else {"peak": (peak + rank) * GIB}),
            "sizes": {"hidden_size": 64},
        }
        (folder / f"rank_{rank}.json").write_text(json.dumps(document | changes))
    (folder / "log.txt").write_text(log_of(losses))


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "plain", (20, 80), peak=3)
    write_run(tmp_path / "vp", (50, 40), rows=[512, 512], losses=LOSSES | {3: "9.599040E+00"}, peak=2)
    return tmp_path / "plain", tmp_path / "vp"


def said(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, words)])
    return stopped.value.code, capsys.readouterr()


def test_the_json_has_time_memory_and_losses_of_both_runs(runs, capsys):
    status, streams = said(capsys, *runs, "--format", "json")
    found = json.loads(streams.out)
    assert status == 0 and found.keys() == {"plain", "vocabulary_parallel", "largest_loss_difference"}
    plain, split = found["plain"], found["vocabulary_parallel"]
    assert plain["iteration_seconds"] == pytest.approx([0.1, 0.1])
    assert plain["busy_seconds"] == pytest.approx([0.02, 0.08])
    assert split["waiting_seconds"] == pytest.approx([0.05, 0.06])
    assert plain["peak_memory_bytes"] == [3 * GIB, 4 * GIB] and split["peak_memory_bytes"] == [2 * GIB, 3 * GIB]
    assert plain["losses"] == [9.72401, 9.738344, 9.6] and split["losses"] == [9.72401, 9.738344, 9.59904]
    assert found["largest_loss_difference"] == pytest.approx(1e-4)


def test_the_text_says_it_by_rank_and_which_run_is_faster(runs, capsys):
    status, streams = said(capsys, *runs)
    lines = [" ".join(line.split()) for line in streams.out.splitlines()]
    assert status == 0
    assert "0 1,000 | 1,000 2 | 2 0.0200 20% | 0.0500 50% 0.0800 | 0.0500 3.00 | 2.00" in lines
    assert "busiest rank's computing time per iteration: 0.0800 s | 0.0500 s" in lines
    assert "loss of the plain run: 9.7240 in iteration 1, 9.6000 in iteration 3" in lines
    assert lines[-1].endswith("1.0e-04, in iteration 3 (3 iterations compared)")


def test_memory_that_a_cpu_does_not_measure_is_not_made_up(tmp_path):
    for name in ("plain", "vp"):
        write_run(tmp_path / name, (20, 80))
    runs = read_two_runs(tmp_path / "plain", tmp_path / "vp")
    assert "GiB" not in runs.text()
    assert runs.document()["plain"]["peak_memory_bytes"] == [None, None]


def test_the_picture_goes_to_the_file_that_is_named(runs, tmp_path, capsys):
    assert said(capsys, *runs, "-o", tmp_path / "report.png")[0] == 0
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    status, streams = said(capsys, *runs, "--format", "png")
    assert status == 2 and "name a file with -o" in streams.err


def test_logs_may_lie_elsewhere(runs, tmp_path, capsys):
    for name, run in zip(("a", "b"), runs, strict=True):
        (run / "log.txt").rename(tmp_path / name)
    status, streams = said(capsys, *runs)
    assert status == 2 and f"{runs[0]} contains no log with losses: name the logs" in streams.err
    status, streams = said(capsys, *runs, "--logs", tmp_path / "a", tmp_path / "b", "--format", "json")
    assert status == 0 and json.loads(streams.out)["largest_loss_difference"] == pytest.approx(1e-4)


def test_an_iteration_that_a_resumed_run_repeats_counts_once(tmp_path):
    (tmp_path / "log").write_text(log_of({1: "9.0", 2: "8.0"}) + "[default3]:" + log_of({2: "7.0", 3: "6.0"}))
    assert read_losses(tmp_path / "log") == {1: 9.0, 2: 7.0, 3: 6.0}


def test_of_longer_intervals_only_whole_ones_count_and_the_first_iteration_of_a_start(tmp_path):
    starts = ({1: "9.0", 10: "8.0", 20: "7.0"}, {15: "6.5", 20: "6.0"}, {20: "5.5", 30: "5.0"}, {31: "4.5", 40: "4.0"})
    (tmp_path / "log").write_text("".join(map(log_of, starts)))
    assert read_losses(tmp_path / "log", 10) == {1: 9.0, 10: 8.0, 15: 6.5, 20: 7.0, 30: 5.0, 31: 4.5, 40: 4.0}


def change(name, **changes):
    def apply(plain, split):
        path = (plain if name == "plain" else split) / "rank_1.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


OTHER_FILE = "rank_1.json is truncated, or is not a file that --rank-report"
REFUSED = {
    "no such folder": (lambda plain, split: plain.rename(plain.with_name("x")), "contains no rank_"),
    "a rank's report is missing": (lambda plain, split: (plain / "rank_0.json").unlink(), r"of ranks \[1\]"),
    "fewer ranks than the run had": (lambda plain, split: (split / "rank_1.json").unlink(), "has ranks 0 to 1"),
    "another file": (change("vp", iteration_milliseconds=None), OTHER_FILE),
    "no JSON": (lambda plain, split: (plain / "rank_1.json").write_text("{"), OTHER_FILE),
    "ranks of two runs": (change("vp", run="another"), r"of different runs \(ranks 0 and 1\): give each run an empty"),
    "two logs": (lambda plain, split: (plain / "b.out").write_text(log_of(LOSSES)), r"several logs \(b.out, log.txt\)"),
    "a loss that is no number": (
        *(lambda plain, split: (split / "log.txt").write_text(log_of(LOSSES | {2: "nan"})), "iteration 2 in .* is nan"),
    ),
    "iterations of other numbers": (
        lambda plain, split: (split / "log.txt").write_text(log_of({10: "5.0", 20: "4.0"})),
        r"no iteration in common \(the first has iterations 1 to 3, the second has 10 to 20\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_one_line(runs, case):
    spoil, words = REFUSED[case]
    spoil(*runs)
    with pytest.raises(UserError, match=words):
        read_two_runs(*runs)


def test_runs_in_the_wrong_order_or_of_two_jobs_are_refused(runs, tmp_path, capsys):
    status, streams = said(capsys, runs[1], runs[0])
    assert (status, streams.err.count("\n")) == (2, 1) and "give the plain run first" in streams.err
    write_run(tmp_path / "three", (1, 2, 3), rows=[512, 512, 512])
    with pytest.raises(UserError, match="differ in pipeline ranks \\(2 and 3\\): give two runs"):
        read_two_runs(runs[0], tmp_path / "three")
    write_run(tmp_path / "eight", (20, 80), rows=[512, 512], microbatches_by_iteration=[8, 8, 8])
    with pytest.raises(UserError, match="differ in microbatches per iteration \\(4 and 8\\)"):
        read_two_runs(runs[0], tmp_path / "eight")
    write_run(tmp_path / "rare", (20, 80), rows=[512, 512], log_interval=2)
    with pytest.raises(UserError, match="differ in --log-interval \\(1 and 2\\)"):
        read_two_runs(runs[0], tmp_path / "rare")
    write_run(tmp_path / "wide", (20, 80), rows=[512, 512], sizes={"hidden_size": 128})
    with pytest.raises(UserError, match="differ in hidden_size \\(64 and 128\\)"):
        read_two_runs(runs[0], tmp_path / "wide")
