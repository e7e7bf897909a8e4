"""Reads text files, and writes files completely or not at all."""

from __future__ import annotations

import functools
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron_vp.errors import UserError, say

MIB = 2**20


def read_text(path: str | os.PathLike[str], what: str, most: int, errors: str = "strict") -> str:
    """Read the file at `path` as UTF-8 text, and drop a leading byte order mark.

    `what` names the file in error messages, and `errors` is passed to `bytes.decode`. Raises UserError for files that
    cannot be read, are not text or exceed `most` bytes.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from error
    if len(data) > most:
        raise UserError(
            f"cannot read {what} {path}: it is larger than {most // MIB} MiB, so it is probably the wrong file; check "
            "the path"
        )
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {what} {path}: it is not UTF-8 text") from error


@contextmanager
def replacing(path: str | os.PathLike[str], most_mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new binary file that replaces `path` when the block ends; if the block raises, the new file is removed.

    Until the block ends, the new file has a random name in the folder of `path`. It is created exclusively, so that
    other users who can write to the folder cannot redirect it with a link. It gets the permissions of the file that it
    replaces, limited by `most_mode`. If `path` is a link, the link is replaced, not its target. Raises OSError if the
    file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, most_mode)
    try:
        with open(descriptor, "wb") as file:
            with suppress(OSError):
                if stat.S_ISREG(before := path.lstat().st_mode):
                    os.fchmod(descriptor, stat.S_IMODE(before) & most_mode)
            yield file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def write_report(path: Path, text: str, what: str) -> None:
    """Write a file that is not essential for the run: if writing fails, print one line and continue."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        warn_once(f"warning: cannot write {what} {path}: {error.strerror}; the run continues without it")


@functools.cache
def warn_once(line: str) -> None:
    """Print a line on standard error, but only once per process, with the rank as prefix if known; ignore failures."""
    rank = os.environ.get("RANK")
    say(line if rank is None else f"rank {rank}: {line}")
