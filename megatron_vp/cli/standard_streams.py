"""Handles standard streams that are closed or full, or whose encoding lacks a character."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_vp.errors import UserError


class _Output(io.FileIO):
    """Standard output that raises UserError at the first failed write, or BrokenPipeError if a pipe has no reader."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Discard the remaining output.
            if isinstance(error, BrokenPipeError):
                raise
            closed = "it is closed; name a file with -o, or redirect the output"
            reason = closed if error.errno == errno.EBADF else error.strerror
            raise UserError(f"cannot write to standard output: {reason}") from None


@contextmanager
def checked_output() -> Iterator[None]:
    """Make standard output raise UserError if writing fails, and print `?` for characters that it cannot encode.

    If standard output has been replaced, as in a test, it is not changed.
    """
    before = sys.stdout
    if before is not None and before is not sys.__stdout__:
        yield
        return
    # Fill the gaps of closed streams. Otherwise a file opened later could get the descriptor of a standard stream and
    # receive the output of libraries. Writing to these descriptors fails, as to closed ones.
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    encoding = "utf-8" if before is None else before.encoding
    errors = before.errors if before is not None and encoding.lower() == "utf-8" else "replace"
    raw = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=raw.isatty())
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout = before
