"""Files of text: whatever an input's path leads to, reading it ends soon; and reports that a run can do without."""

from __future__ import annotations

import functools
import os
import stat
import sys
from pathlib import Path

from megatron_vp.errors import UserError

MIB = 2**20


def read_text(path: str | os.PathLike[str], what: str, most: int, errors: str = "strict") -> str:
    """The text (UTF-8, a mark at its beginning left out) of the `what` at `path`.

    A pipe that somebody writes to is read to its end. `errors` is that of `bytes.decode`. Raises UserError for what
    cannot be read, a pipe that nobody writes to, what is no text, and what has more than `most` bytes.
    """
    try:
        # Opening a pipe would wait for a writer who may never come.
        descriptor = os.open(Path(path), os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            os.set_blocking(descriptor, True)
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            data = b"" if size > most else file.read(most + 1)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from error
    if max(size, len(data)) > most:
        raise UserError(f"cannot read {what} {path}: it has more than {most // MIB} MiB; give the file itself")
    if stat.S_ISFIFO(status.st_mode) and not data:
        raise UserError(f"cannot read {what} {path}: it is a pipe that nobody has written to")
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {what} {path}: it is not text") from error


def write_report(path: Path, text: str, what: str) -> None:
    """Write a file that its run can do without; it appears complete or not at all.

    Where it cannot be written, says so in one line on standard error, once, and the run goes on.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        _say_once(f"warning: cannot write {what} {path}: {error.strerror}; the run goes on without it")


@functools.cache
def _say_once(line: str) -> None:
    rank = os.environ.get("RANK")
    print(line if rank is None else f"rank {rank}: {line}", file=sys.stderr, flush=True)
