"""Test that invalid input files give a one-line error at once, and that outputs are complete or absent."""

import argparse
import os
import resource
import stat
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_vp.cli.result_output import write
from megatron_vp.cost.paper.cells import write_lists
from megatron_vp.cost.paper.published import jobs
from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text, replacing, write_report
from megatron_vp.jobs.resolved import write_resolved


def _sparse(path):
    path.touch()
    os.truncate(path, 2**31)


KINDS = {
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "it is larger than 1 MiB"),
    "a file of two GB": (_sparse, "it is larger than 1 MiB"),
    "a binary": (lambda path: path.write_bytes(b"\x7fELF\xff\xfe"), "it is not UTF-8 text"),
    "nothing": (lambda path: None, "No such file"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_text_file_is_refused_with_its_name(tmp_path, kind):
    make, words = KINDS[kind]
    make(tmp_path / "input")
    with pytest.raises(UserError, match=f"cannot read schedule file {tmp_path}/input: {words}"):
        read_text(tmp_path / "input", "schedule file", MIB)


def test_a_pipe_is_read_to_its_end():
    reading, writing = os.pipe()
    text = "a line\n" * 20_000  # more than a pipe holds

    def write():
        with open(writing, "w", encoding="utf-8-sig") as file:
            file.write(text)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(f"/dev/fd/{reading}", "schedule file", MIB) == text
    writer.join()
    os.close(reading)


WRITERS = {
    "a run's arguments": lambda path: write_resolved(argparse.Namespace(text="x" * 5000), path),
    "a report": lambda path: write_report(path, "x" * 5000, "the report"),
    "a command's result": lambda path: write("x" * 5000, path),
    "a list of cells": lambda path: write_lists(path.parent, [cell for cell in jobs() if cell.gpus == 8]),
}
NAMES = {"a list of cells": "8_gpus.tsv"}


@pytest.mark.parametrize("what", WRITERS)
def test_a_link_that_was_planted_is_not_written_through(tmp_path, what):
    path = tmp_path / "folder" / NAMES.get(what, "output")
    path.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f".{path.name}.{os.getpid()}", f".{path.name}", f"{path.name}.partial"):
        (path.parent / name).symlink_to(victim)
    WRITERS[what](path)
    assert victim.read_text() == "precious" and path.is_file() and not path.is_symlink()
    assert len(list(path.parent.iterdir())) == 4, "nothing else is left"


@contextmanager
def full_disk():
    """No file of this process grows beyond a KiB. No fixture: pytest's own output may be a file, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", WRITERS)
def test_what_does_not_fit_on_the_disk_leaves_the_old_file_and_nothing_else(tmp_path, capsys, what):
    path = tmp_path / NAMES.get(what, "output")
    path.write_text("old")
    try:
        with full_disk():
            WRITERS[what](path)
    except UserError as error:
        assert "cannot write" in str(error) and "\n" not in str(error)
    else:
        assert what == "a report" and "cannot write the report" in capsys.readouterr().err
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_keeps_its_permissions_within_the_limit(tmp_path):
    path: Path = tmp_path / "file"
    path.touch()
    path.chmod(0o604)
    with replacing(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    with replacing(path, most_mode=0o640) as file:
        file.write(b"newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b"newer"
