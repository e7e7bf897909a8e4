"""The `megatron-vp` command as a shell sees it: streams, exit status, interruption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_vp.cli.app import main

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


def test_a_full_disk_behind_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        command = start(*LONG, stdout=full)
        _, said = command.communicate()
    assert command.returncode == 2
    assert said == "megatron-vp: error: cannot write to standard output: No space left on device\n"


def test_an_output_that_is_closed_is_one_line():
    command = [*COMMAND, "schedule", "1f1b", "-p", "2", "-m", "2"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot write to standard output: it is closed" in done.stderr


def test_an_interruption_ends_the_command_and_its_workers_with_status_130():
    command = start("tables")
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    deadline = time.monotonic() + 60
    while len(children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)
    said = command.communicate(timeout=30)[1]
    assert command.returncode == 130
    assert "Traceback" not in said


def test_help_is_asked_for_by_either_name_and_named_where_a_word_is_unknown():
    short, long = (start("schedule", word).communicate()[0] for word in ("-h", "--help"))
    assert short == long != ""
    assert start("frobnicate").communicate()[1] == "megatron-vp: error: No such command 'frobnicate'; see --help\n"
