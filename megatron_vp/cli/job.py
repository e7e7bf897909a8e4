"""How a command takes a job: its configuration and flags as in training, the first file with or without `--config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.jobs.command_line import name_of

TAKES_A_JOB = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of such a command: it takes options that it does not know, which are the job's."""

JobArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [FLAGS]",
        help="The job, as for training: a file such as configs/llama3_8b.yaml, or the name of one that comes with "
        "megatron_vp (llama3_8b), then any flags.",
    ),
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="FILE", help="Overlay for CONFIG; may be repeated, later files win."),
]


def options_of(context: typer.Context) -> list[str]:
    """The names of the options that the running command has besides those of the job, with underscores."""
    options = [option for each in context.command.params for option in each.opts if option.startswith("--")]
    return [name_of(option) for option in options]
