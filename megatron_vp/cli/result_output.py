"""Writes a command's result to the screen or a file, and shows its progress."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron_vp.errors import UserError, say
from megatron_vp.files import replacing

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


TOLD_BY_SUFFIX = ("json", "csv", "svg", "png", "html")
"""Suffixes that select the format of an output file."""

UNKNOWN_SUFFIXES = ("pdf", "jpg", "jpeg", "gif", "yaml", "yml", "xlsx")
"""Common suffixes of file formats that no command can write."""

LINE_EVERY, REDRAW_EVERY = 2.0, 0.1
"""Seconds between progress lines in a pipe or file, and between updates of the bar on a terminal."""

_WRITTEN_AS = {"perfetto": "json", "programs": "json"}


def format_for[F: StrEnum](asked: F | None, output: Path | None, formats: type[F], otherwise: str = "table") -> F:
    """Choose a result's format: the requested one, else the one named by the suffix of `output`, else `otherwise`.

    Call this function before the command starts its work. Raises UserError if the suffix contradicts the requested
    format or names a format that the command cannot write, if a picture has no output file, or if the file cannot be
    created.
    """
    suffix = "" if output is None else output.suffix.lower().removeprefix(".")
    known = [each.value for each in formats]
    if suffix in UNKNOWN_SUFFIXES or (suffix in TOLD_BY_SUFFIX and suffix not in known):
        raise UserError(f"cannot write {output}: this command writes {', '.join(known)}; choose another suffix")
    chosen = asked if asked is not None else formats(suffix if suffix in TOLD_BY_SUFFIX else otherwise)
    if suffix in TOLD_BY_SUFFIX and _WRITTEN_AS.get(chosen.value, chosen.value) != suffix:
        raise UserError(
            f"--format {chosen.value} and -o {output} contradict each other: leave out --format, or rename the file"
        )
    check_destination(chosen.value == "png", output)
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


def progress_bar() -> Progress:
    """Show progress on standard error: a bar on a terminal, otherwise a line every few seconds.

    The bar is removed at the end. It is redrawn only when progress is reported, not by a thread, because a process with
    threads cannot safely fork workers.
    """
    from rich.console import Console
    from rich.progress import Progress

    class Shown(Progress):
        shown_at = time.monotonic()
        said = ""

        def update(self, task_id: TaskID, **changes: Any) -> None:
            super().update(task_id, **changes)
            now = time.monotonic()
            if now < self.shown_at + (LINE_EVERY if self.disable else REDRAW_EVERY):
                return
            self.shown_at = now
            if not self.disable:
                self.refresh()
                return
            task = next(each for each in self.tasks if each.id == task_id)
            line = f"{task.description}: {task.percentage:.0f} %"
            if task.total and line != self.said:
                self.said = line
                say(line)

    console = Console(stderr=True)
    return Shown(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
