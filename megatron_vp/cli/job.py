"""Parameters of commands that take a job: a configuration file, further files (`--config`), and training flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.jobs.command_line import name_of

TAKES_A_JOB = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer settings for a command that takes a job: options that the command does not define become training flags."""

JobArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [FLAGS]",
        help="The training job: a configuration file such as configs/llama3_8b.yaml, or the name of a configuration "
        "that comes with megatron_vp, such as llama3_8b. Training flags may follow.",
    ),
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", metavar="FILE", help="File that overrides CONFIG and earlier --config files; may be repeated."
    ),
]


def options_of(context: typer.Context) -> list[str]:
    """Names, with underscores, of the options that the running command itself defines; training flags are left out."""
    options = [option for each in context.command.params for option in each.opts if option.startswith("--")]
    return [name_of(option) for option in options]
