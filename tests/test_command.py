"""Test the `megatron-vp` command in a shell: streams, exit status, interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_vp.cli.app import SECTIONS, app, main

COMMAND = [sys.executable, "-m", "megatron_vp.cli.app"]
LONG = ["schedule", "1f1b", "-p", "8", "-m", "400", "--format", "json"]


def start(*arguments, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    # An interactive shell lets its children be interrupted, whatever this process does about it.
    return subprocess.Popen(
        [*COMMAND, *arguments],
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **streams,
    )


def shown(capsys, *words):
    """What a command prints before it ends with status 0."""
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert not stopped.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [["schedule", "--no-such-option"], ["no-such-command"], ["schedule", "-p", "two"]])
def test_words_that_are_no_command_are_one_line(capsys, words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out
    assert said.err.startswith("megatron-vp: error: ") and said.err.count("\n") == 1


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    command = start(*LONG)
    command.stdout.close()
    assert command.stderr.read() == ""
    assert command.wait() == 1


@pytest.mark.parametrize("group", [None, *app.registered_groups], ids=lambda group: group.name if group else "all")
def test_the_summaries_of_the_commands_are_shown_uncut(group, capsys, monkeypatch):
    """Of all commands and groups, in a terminal of 80 columns."""
    words = [group.name] if group else []
    listed = app if group is None else group.typer_instance
    known = {command.name for command in (*listed.registered_commands, *listed.registered_groups)}
    monkeypatch.setenv("COLUMNS", "80")
    said = shown(capsys, *words, "--help")
    rows = [line.split(maxsplit=1) for line in said.partition("Options:\n")[2].splitlines() if line]
    lines = [row for row in rows if row[0] in known]
    if group is None:
        assert [row[0] for row in lines] == [name for names in SECTIONS.values() for name in names]
        assert all(f"\n{title}:\n" in said for title in SECTIONS)
    assert {name for name, _ in lines} == known
    for _, summary in lines:
        assert len(summary) <= 50 and summary.endswith(".") and not summary.endswith("..."), summary


@pytest.mark.parametrize("words", ["--help", "simulate llama3_8b"])
def test_every_command_says_in_one_line_that_it_cannot_print(words):
    for redirection, reason in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        shell = ["sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, *words.split()]
        done = subprocess.run(shell, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"megatron-vp: error: cannot write to standard output: {reason}")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_told_does_not_go_into_the_data(redirection):
    command = [*COMMAND, "schedule", "1f1b", "-p", "0", "-m", "2"]
    done = subprocess.run(["sh", "-c", f'"$@" {redirection}', "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_with_a_closed_standard_error_nothing_else_is_written_into_a_result(tmp_path):
    command = [*COMMAND, "schedule", "1f1b", "-p", "2", "-m", "2", "--format", "json", "-o", str(tmp_path / "s.json")]
    done = subprocess.run(["sh", "-c", '"$@" 2>&- <&-', "sh", *command], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads((tmp_path / "s.json").read_text())["schedule"] == "1f1b"


def test_an_interruption_ends_the_command_and_its_workers_with_status_130():
    command = start("plan", "llama3_8b", "--nodes", "4")
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    deadline = time.monotonic() + 60
    while len(children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)
    said = command.communicate(timeout=30)[1]
    assert command.returncode == 130
    assert "Traceback" not in said


def test_help_is_asked_for_by_either_name_and_named_where_a_word_is_unknown(capsys):
    assert shown(capsys, "schedule", "-h") == shown(capsys, "schedule", "--help") != ""
    with pytest.raises(SystemExit):
        main(["frobnicate"])
    assert capsys.readouterr().err == "megatron-vp: error: No such command 'frobnicate'; see --help\n"
