"""Test `megatron-vp schedule`: every format, reading files back, and one-line errors for impossible requests."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from megatron_vp.cli.app import app
from megatron_vp.errors import UserError
from megatron_vp.schedule import evaluation, generate, lower

FAMILY = ["1f1b", "-p", "3", "-m", "4", "--vocab", "vocab-2"]


def run(*arguments):
    return CliRunner().invoke(app, ["schedule", *map(str, arguments)])


def slices(text, lane, rank=None):
    """Slices of the lanes with this name in a Perfetto trace, in order of time; of one rank, or of all."""
    events = json.loads(text)["traceEvents"]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == lane}
    threads = {(pid, tid) for pid, tid in threads if rank in (None, pid)}
    found = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in threads]
    return sorted(found, key=lambda event: event["ts"])


def test_table_shows_metrics_and_every_rank():
    lines = run(*FAMILY, "--cost", "comm=0.5").stdout.splitlines()
    assert lines[0] == "schedule 1f1b, vocabulary vocab-2: 3 ranks, 1 chunk per rank, 4 microbatches"
    assert "comm=0.5" in lines[1]
    assert [line.split()[0] for line in lines[-3:]] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "family",
    [
        ["v-half", "-p", "3", "-m", "4", "--vocab", "vocab-1"],
        ["zb-h1", "-p", "2", "-m", "3"],
        ["interleaved", "-p", "2", "-m", "3", "--chunks", "3"],
        ["interlaced", "-p", "3", "-m", "4"],
    ],
    ids=lambda family: family[0],
)
def test_schedules_with_chunks_and_w_and_v_passes_read_back_and_draw(family, tmp_path):
    for kind in ("json", "csv"):
        path = tmp_path / f"schedule.{kind}"
        assert run(*family, "--format", kind, "-o", path).exit_code == 0
        assert run("--from", path, "--format", kind).stdout == path.read_text()
    picture = run("--from", path, "--format", "svg").stdout
    passes = slices(run(*family, "--format", "perfetto").stdout, "compute")
    assert len(passes) == sum(len(order) for order in json.loads((tmp_path / "schedule.json").read_text())["ranks"])
    assert ("W weight gradient" in picture) == any(event["cat"] == "W" for event in passes)
    assert ("chunk 1" in picture) == any(event["args"]["chunk"] == 1 for event in passes)
    assert ("V vocabulary" in picture) == (family[0] == "interlaced")


def test_only_the_ranks_that_are_asked_for_have_vocabulary_passes(tmp_path):
    family = ["1f1b", "-p", "4", "-m", "5", "--vocab", "vocab-2", "--vocab-ranks", "1"]
    assert run(*family).stdout.startswith("schedule 1f1b, vocabulary vocab-2 on rank 1: 4 ranks, ")
    programs = json.loads(run(*family, "--format", "programs").stdout)["programs"]
    for rank, program in enumerate(programs):
        assert any(each.get("pass") == "S" for each in program) == (rank == 1)
        members = [each["members"] for each in program if each.get("lane") == "collectives"]
        assert all(each == [0, 1, 3] for each in members) and bool(members) == (rank != 2)
    path = tmp_path / "schedule.csv"
    assert run(*family, "--format", "csv", "-o", path).exit_code == 0
    assert json.loads(run("--from", path, "--format", "programs").stdout)["programs"] == programs
    evaluated = json.loads(run(*family, "--evaluation", "--format", "json").stdout)
    assert [{e["pass"] for e in order} for order in evaluated["ranks"]] == [{"F"}, {"IF", "F", "S"}, {"F"}, {"F"}]


def test_pictures_are_pictures(tmp_path):
    svg, png = tmp_path / "s.svg", tmp_path / "s.png"
    assert run(*FAMILY, "--format", "svg", "-o", svg).exit_code == 0
    assert run(*FAMILY, "--format", "png", "-o", png).exit_code == 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "rank 2" in svg.read_text() and "S output layer" in svg.read_text()
    assert "collectives" not in svg.read_text()
    assert "collectives" in run(*FAMILY, "--cost", "comm=0.2", "--format", "svg").stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_perfetto_trace_has_collectives_on_every_rank():
    text = run(
        "v-half", "-p", "3", "-m", "4", "--vocab", "vocab-2", "--cost", "comm=0.2", "--format", "perfetto"
    ).stdout
    collectives = slices(text, "second stream")
    assert len(collectives) == 3 * 4 * 4 and {event["cat"] for event in collectives} == {"collective"}


OFFLOADED = [
    *("po", "-p", "3", "-m", "5", "--chunks", "3", "--offload-chunks", "half"),
    *("--vocab", "vocab-2", "--cost", "copy=0.9"),
]


def test_offloaded_activations_show_in_all_formats(tmp_path):
    document = json.loads(run(*OFFLOADED, "--format", "json").stdout)
    assert document["offloaded"] == [[rank, chunk] for rank in range(3) for chunk in range(2)]
    moves = [each for order in document["ranks"] for each in order if each["pass"] in ("O", "R")]
    assert len(moves) == 2 * 5 * 6 and all(each["start"] == each["end"] for each in moves)
    host = max(document["metrics"]["peak_host"])
    lines = run(*OFFLOADED).stdout.splitlines()
    assert lines[3].endswith("in host memory") and max(float(line.split()[-1]) for line in lines[4:7]) == round(host, 3)
    trace = run(*OFFLOADED, "--format", "perfetto").stdout
    copies = slices(trace, "copies", 1)
    assert len(copies) == 2 * 5 * 2 and all(each["dur"] == pytest.approx(300) for each in copies)
    assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-6 for before, after in pairwise(copies))
    programs = json.loads(run(*OFFLOADED, "--format", "programs").stdout)
    assert programs["offloaded"] == document["offloaded"]
    copy = {"operation": "copy-out:2.1[0]", "members": [0], "lane": "copies of rank 0"}
    assert {"do": "post", **copy} in programs["programs"][0] and {"do": "wait", **copy} in programs["programs"][0]
    picture = tmp_path / "schedule.svg"
    assert run(*OFFLOADED, "-o", picture).exit_code == 0
    assert "copies to and from the host" in picture.read_text()
    for kind in ("json", "csv"):
        path = tmp_path / f"schedule.{kind}"
        run(*OFFLOADED, "-o", path)
        again = run("--from", path, "--cost", "copy=0.9", "--format", "json").stdout
        assert json.loads(again)["metrics"] == document["metrics"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "-p RANKS"),
        (["1f1b", "-p", 2], "-m MICROBATCHES"),
        (["1f1c", "-p", 2, "-m", 2], "nearest"),
        ([*FAMILY, "--cost", "F=fast"], "cost 'F=fast' is not valid"),
        ([*FAMILY, "--format", "png"], "-o"),
        (["1f1b", "-p", 8, "-m", 1000000], "more than 1,000,000 forward"),
        ([*FAMILY, "-o", "/dev/full"], "cannot write /dev/full"),
        ([*FAMILY, "-o", "/no/such/folder/file"], "the folder /no/such/folder does not exist"),
        ([*FAMILY, "-o", "/"], "it is a folder"),
        (["--from", "no such file"], "cannot read"),
        (["1f1b", "--from", "file"], "leave out NAME"),
        (["--from", "file", "--vocab", "vocab-1"], "leave out --vocab"),
        (["--from", "file", "--vocab-ranks", "0"], "leave out --vocab-ranks"),
        ([*FAMILY, "--vocab-ranks", "0,x"], "--vocab-ranks '0,x' is not a list of ranks"),
        ([*FAMILY, "--vocab-ranks", "0,3"], "on ranks 0, 1, 2; use these ranks"),
        (["zb-v", "-p", 3, "-m", 4, "--vocab-ranks", "0"], "cannot be used with schedule zb-v and vocab method none"),
        ([*FAMILY, "--offload-chunks", "some"], "not a number of chunks; give half, all or a number from 0 to 1"),
        ([*FAMILY, "--offload-chunks", 2], "cannot offload 2 chunks with schedule 1f1b, which has 1 per rank"),
        (["--from", "file", "--offload-chunks", "all"], "leave out --offload-chunks"),
        ([*FAMILY, "--cost", "O=1"], "'O=1' is not valid: write NAME=NUMBER"),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    result = run(*arguments)
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception) and "\n" not in str(result.exception)


def test_a_file_with_a_schedule_that_cannot_run_is_one_line(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(run(*FAMILY, "--format", "csv").stdout.replace(",1S2", ""))
    result = run("--from", path)
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "rank 1 lacks S2 (pytorch, vocab-2)"


@pytest.mark.parametrize("evaluates", [False, True])
def test_programs_are_those_that_the_runtime_lowers(evaluates):
    written = json.loads(run(*FAMILY, "--format", "programs", *["--evaluation"] * evaluates).stdout)
    schedule = generate("1f1b", 3, 4, vocab="vocab-2")
    programs = lower(evaluation(schedule) if evaluates else schedule)
    assert {key: written[key] for key in ("schedule", "vocab", "pipeline_size", "chunks", "microbatches")} == {
        "schedule": "1f1b", "vocab": "vocab-2", "pipeline_size": 3, "chunks": 1, "microbatches": 4,
    }  # fmt: skip
    assert written["placement"] == [[0], [1], [2]]
    for found, program in zip(written["programs"], programs, strict=True):
        assert len(found) == len(program.instructions)
        for entry, instruction in zip(found, program.instructions, strict=True):
            if entry["do"] == "run":
                name = {"LOAD": "LOAD:", "LOSS": "LOSS:"}.get(entry["pass"], entry["pass"])
                assert f"{name}{entry['microbatch']}" == str(instruction) and entry["chunk"] == 0
            else:
                assert {"post": "+", "wait": "?"}[entry["do"]] + entry["operation"] == str(instruction)
    kinds = {entry["pass"] for program in written["programs"] for entry in program if entry["do"] == "run"}
    assert kinds == {"LOAD", "IF", "F", "S", "LOSS"} | (set() if evaluates else {"T", "B", "IB"})
    (sent,) = [e for e in written["programs"][0] if e["do"] == "post" and e["operation"] == "activation:3[0>1]"]
    assert sent["members"] == [0, 1] and sent["lane"] == "0>1 activation"
