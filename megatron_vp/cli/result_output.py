"""Writes a command's result to the screen or a file, and shows its progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import typer

from megatron_vp.errors import UserError, say
from megatron_vp.files import replacing

FORMAT_SUFFIXES = ("json", "csv", "svg", "png", "html", "pdf", "jpg", "jpeg", "gif", "yaml", "yml", "xlsx")
"""Suffixes that name the format of an output file. No command can write all of them."""

LINE_EVERY = 2.0
"""Seconds between lines of progress."""

_WRITTEN_AS = {"perfetto": "json", "programs": "json"}


def format_for[F: StrEnum](asked: F | None, output: Path | None, formats: type[F], otherwise: str = "table") -> F:
    """Choose a result's format: the requested one, else the one named by the suffix of `output`, else `otherwise`.

    Call this function before the command starts its work. Raises UserError if the suffix contradicts the requested
    format or names a format that the command cannot write, if a picture has no output file, or if the file cannot be
    created.
    """
    suffix = "" if output is None else output.suffix.lower().removeprefix(".")
    known, named = [each.value for each in formats], suffix in FORMAT_SUFFIXES
    if named and suffix not in known:
        raise UserError(f"cannot write {output}: this command writes {', '.join(known)}; choose another suffix")
    chosen = formats(suffix if named else otherwise) if asked is None else asked
    if named and _WRITTEN_AS.get(chosen, chosen) != suffix:
        raise UserError(
            f"--format {chosen.value} and -o {output} contradict each other: leave out --format, or rename the file"
        )
    check_destination(chosen == "png", output)
    return chosen


def check_destination(is_picture: bool, output: Path | None) -> None:
    """Raise UserError if a picture has no output file, or if the file cannot be created; call this before any work."""
    if output is None:
        if is_picture:
            raise UserError("a picture cannot be shown in the terminal; name a file with -o")
    elif output.is_dir():
        raise UserError(f"cannot write {output}: it is a folder; name a file")
    elif not output.parent.is_dir():
        raise UserError(f"cannot write {output}: the folder {output.parent} does not exist; create it first")
    elif not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UserError(f"cannot write {output}: permission denied; choose another path")


def write(content: str | bytes, output: Path | None) -> None:
    """Write a result to the file `output`, either completely or not at all; print the result if `output` is None.

    Raises UserError if a picture has no output file, or if the file cannot be written.
    """
    check_destination(isinstance(content, bytes), output)
    if output is None:
        typer.echo(content, nl=False)
        return
    data = content if isinstance(content, bytes) else content.encode()
    try:
        if output.exists() and not output.is_file():  # Write into a device or a pipe instead of replacing it.
            output.write_bytes(data)
            return
        with replacing(output.resolve()) as file:  # If `output` is a link, replace its target, not the link.
            file.write(data)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None


def progress_lines() -> Callable[[str, int, int], None]:
    """Return a function that takes the name of a step, the number of its tasks that are done, and their total. Every
    LINE_EVERY seconds, it writes a line to standard error.
    """
    said_at = time.monotonic()

    def report(what: str, done: int, of: int) -> None:
        nonlocal said_at
        if time.monotonic() >= said_at + LINE_EVERY:
            said_at = time.monotonic()
            say(f"{what}: {100 * done // of} %")

    return report
