"""Where a command's result goes, the screen or a file, and how it shows that it works on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megatron_vp.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def check_destination(is_picture: bool, output: Path | None) -> None:
    """To be called before the work. Raises UserError for a picture without a file."""
    if is_picture and output is None:
        raise UserError("a picture does not go to the screen; name a file with -o")


def write(content: str | bytes, output: Path | None) -> None:
    """Write to `output`, or print where it is None. Raises UserError for a picture without a file, and a bad file."""
    check_destination(isinstance(content, bytes), output)
    if output is None:
        try:
            typer.echo(content, nl=False)
        except BrokenPipeError:
            raise  # a reader that has seen enough, such as head
        except OSError as error:
            raise UserError(f"cannot write to standard output: {error.strerror}") from None
        return
    try:
        output.write_bytes(content if isinstance(content, bytes) else content.encode())
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
