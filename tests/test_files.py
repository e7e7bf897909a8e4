"""Input files that are none: reading them ends at once, in one line."""

import os
import threading

import pytest

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text


def _sparse(path):
    path.touch()
    os.truncate(path, 2**31)


KINDS = {
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "it has more than 1 MiB"),
    "a file of two GB": (_sparse, "it has more than 1 MiB"),
    "a binary": (lambda path: path.write_bytes(b"\x7fELF\xff\xfe"), "it is not text"),
    "a pipe that nobody writes to": (os.mkfifo, "it is a pipe that nobody has written to"),
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
