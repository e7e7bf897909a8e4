"""How a command takes a job: its configuration and flags as in training, the first file with or without `--config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

TAKES_A_JOB = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of such a command: it takes options that it does not know, which are the job's."""

JobArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [FLAGS]",
        help="The job as in training: its configuration, such as configs/llama3_8b.yaml, and any of its flags.",
    ),
]
ConfigOption = Annotated[
    list[Path] | None, typer.Option("--config", metavar="FILE", help="Laid over CONFIG; may be repeated.")
]


def files_and_flags(words: Sequence[str] | None, overlays: Sequence[Path] | None) -> tuple[list[Path], list[str]]:
    """The configuration files of a job, later ones win, and its flags, which win over all of them."""
    files, flags = list(overlays or ()), list(words or ())
    if flags and not flags[0].startswith("-"):
        files.insert(0, Path(flags.pop(0)))
    return files, flags


def arguments(files: Sequence[Path], flags: Sequence[str]) -> list[str]:
    """The same as the arguments of a training script."""
    return [*(word for file in files for word in ("--config", spelled(file))), *flags]


def spelled(file: Path) -> str:
    """A file as an argument that is not taken for an option."""
    return f"./{file}" if str(file).startswith("-") else str(file)
