"""Handles standard streams that are closed or full, or whose encoding lacks a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron_vp.errors import UserError


class _Output(io.RawIOBase):
    """Standard output that raises UserError at the first failed write, or BrokenPipeError if a pipe has no reader."""

    def __init__(self, reason: str | None) -> None:
        self._reason = reason
        self._failed = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def isatty(self) -> bool:
        return os.isatty(1)

    def write(self, data: bytes) -> int:
        if self._failed:
            return len(data)  # After a failed write, discard the remaining output.
        reason = self._reason
        if reason is None:
            try:
                return os.write(1, data)
            except BrokenPipeError:
                raise
            except OSError as error:
                reason = error.strerror
        self._failed = True
        raise UserError(f"cannot write to standard output: {reason}")


@contextmanager
def checked_output() -> Iterator[None]:
    """Make standard output raise UserError if writing fails, and print `?` for characters that it cannot encode.

    If standard output has been replaced, as in a test, it is not changed.
    """
    before = sys.stdout
    if before is not None and before is not sys.__stdout__:
        yield
        return
    _fill_gaps()
    encoding = "utf-8" if before is None else before.encoding
    raw = _Output("it is closed; name a file with -o, or redirect the output" if before is None else None)
    errors = before.errors if before is not None and encoding.lower() == "utf-8" else "replace"
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=raw.isatty())
    try:
        yield
        sys.stdout.flush()
    finally:
        with suppress(OSError, UserError):
            sys.stdout.flush()
        sys.stdout = before


def _fill_gaps() -> None:
    """Reopen closed standard streams on /dev/null. Otherwise a file opened later could get the descriptor of a standard
    stream and receive the output of libraries.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
