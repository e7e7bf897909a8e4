"""Where a command's result goes, the screen or a file, and how it shows that it works on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megatron_vp.errors import UserError
from megatron_vp.files import replacing

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def check_destination(is_picture: bool, output: Path | None) -> None:
    """To be called before the work. Raises UserError for a picture without a file, and a file that cannot be made."""
    if output is None:
        if is_picture:
            raise UserError("a picture does not go to the screen; name a file with -o")
    elif output.is_dir():
        raise UserError(f"cannot write {output}: it is a folder; name a file")
    elif not output.parent.is_dir():
        raise UserError(f"cannot write {output}: there is no folder {output.parent}; make it first")
    elif not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UserError(f"cannot write {output}: permission denied; choose another place")


def write(content: str | bytes, output: Path | None) -> None:
    """Write to `output`, which appears complete or not at all, or print where it is None.

    Raises UserError for a picture without a file, and a file that cannot be written.
    """
    check_destination(isinstance(content, bytes), output)
    if output is None:
        if sys.stdout is None:
            raise UserError("cannot write to standard output: it is closed; name a file with -o")
        try:
            typer.echo(content, nl=False)
        except BrokenPipeError:
            raise  # a reader that has seen enough, such as head
        except OSError as error:
            raise UserError(f"cannot write to standard output: {error.strerror}") from None
        return
    data = content if isinstance(content, bytes) else content.encode()
    try:
        if output.exists() and not output.is_file():  # a device or a pipe
            output.write_bytes(data)
            return
        with replacing(output.resolve()) as file:  # what a link points to, not the link
            file.write(data)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None


def progress_bar(*columns: ProgressColumn, transient: bool = True) -> Progress:
    """On standard error; nothing where that is no terminal, not even an empty line. `transient`: gone when it is done.

    Without `columns` it has rich's own.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)
