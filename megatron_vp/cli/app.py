"""Entry point of `megatron-vp`: collects the subcommands. Bad input gives a one-line error and exit status 2."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import typer
from typer.core import TyperGroup

from megatron_vp import __version__
from megatron_vp.cli import paper
from megatron_vp.cli.check import check
from megatron_vp.cli.compare import report, trace
from megatron_vp.cli.data import data
from megatron_vp.cli.env import env, flags
from megatron_vp.cli.job import TAKES_A_JOB
from megatron_vp.cli.patch_list import patches
from megatron_vp.cli.plan import plan
from megatron_vp.cli.replay import replay, run
from megatron_vp.cli.sbatch import sbatch
from megatron_vp.cli.schedule import schedule
from megatron_vp.cli.simulate import simulate
from megatron_vp.errors import UserError, say

SECTIONS = {
    "Plan a run": ("plan", "simulate", "schedule"),
    "Run it": ("data", "check", "flags", "run", "sbatch"),
    "Inspect": ("report", "trace", "replay", "env", "patches"),
    "The paper": ("paper", "tables"),
}
"""All commands and command groups of `megatron-vp`, by heading."""


class Sections(TyperGroup):
    """Command group whose help lists the commands under the headings of SECTIONS."""

    def format_commands(self, ctx, formatter) -> None:  # type: ignore[no-untyped-def]
        """Write one section per heading."""
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str()) for name in names])


def add_examples(app: typer.Typer, prefix: str = "") -> None:
    """Append the output recorded by scripts/examples.py to the help of every command in `app` and its groups."""
    for command in app.registered_commands:
        text = files("megatron_vp.cli").joinpath("examples", f"{prefix}{command.name}.txt").read_text(encoding="utf-8")
        command.epilog = f"Example:\n\n\b\n{text}"
    for group in app.registered_groups:
        assert group.typer_instance is not None
        add_examples(group.typer_instance, f"{prefix}{group.name}_")


app = typer.Typer(
    name="megatron-vp",
    cls=Sections,
    help="Vocabulary parallelism and balanced pipeline schedules for Megatron-Core.",
    add_completion=False,
    rich_markup_mode=None,
    # Scripts under `megatron-vp run` keep Python's plain traceback; typer would draw a box around every frame.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
JOB_COMMANDS: dict[Callable[..., Any], str] = {
    plan: "Rank all schedules for a job by predicted time.",
    simulate: "Predict time and memory of every rank of a job.",
    check: "Check a job's arguments without starting it.",
    replay: "Run one rank of a large job alone.",
    sbatch: "Check a job and submit it to SLURM.",
}
OTHER_COMMANDS: dict[Callable[..., Any], str] = {
    schedule: "Generate, read, draw and convert schedules.",
    data: "Turn text into a dataset for Megatron.",
    env: "List the software that a run would use.",
    flags: "List the training flags that the plug-in adds.",
    patches: "List what is patched in Megatron-Core, and why.",
    trace: "Show where the time of a traced run went.",
    report: "Compare a plain and a vocabulary-parallel run.",
}
for commands, settings in (
    (JOB_COMMANDS, TAKES_A_JOB),
    ({run: "Run your Megatron script with the plug-in."}, TAKES_A_JOB | {"allow_interspersed_args": False}),
    (OTHER_COMMANDS, {}),
):
    for command, summary in commands.items():
        app.command(command.__name__, context_settings=settings, short_help=summary)(command)
paper.register(app)
add_examples(app)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version or context.invoked_subcommand is None:
        typer.echo(__version__ if version else context.get_help())
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process.

    If a command returns a function, `main` calls this function after typer has returned.
    """
    # Fill the gaps of closed streams. Otherwise a file opened later could get the number of a standard stream and
    # receive the output of libraries. Writing to these numbers fails, as to closed ones.
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Print `?` for a character that the terminal's encoding lacks.
    try:
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        said = error.format_message().rstrip(".")
        say(f"megatron-vp: error: {said}{'' if said.endswith('?') else '; see --help'}")
        status = 2
    except UserError as error:
        say(f"megatron-vp: error: {error}")
        status = 2
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Discard the remaining output.
        status = 1
        if not isinstance(error, BrokenPipeError):
            closed = "it is closed; name a file with -o, or redirect the output"
            reason = closed if error.errno == errno.EBADF else error.strerror
            say(f"megatron-vp: error: cannot write to standard output: {reason}")
            status = 2
    if callable(status):
        status = status()
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
