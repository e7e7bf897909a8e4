"""Entry point of `megatron-vp`: collects the subcommands. Bad input gives a one-line error and exit status 2."""

from __future__ import annotations

import sys

import typer

from megatron_vp import __version__
from megatron_vp.cli import (
    check,
    compare,
    data,
    env,
    paper,
    patch_list,
    plan,
    replay,
    run,
    sbatch,
    schedule,
    simulate,
    trace,
)
from megatron_vp.cli.help_pages import Sections, add_examples
from megatron_vp.cli.standard_streams import checked_output
from megatron_vp.errors import UserError, say

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
for command in (
    schedule,
    plan,
    simulate,
    data,
    env,
    check,
    patch_list,
    run,
    replay,
    trace,
    compare,
    sbatch,
    paper,
):
    command.register(app)
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
    try:
        with checked_output():
            status = app(arguments, standalone_mode=False)
        if callable(status):
            status = status()
    except typer.TyperException as error:
        said = error.format_message().rstrip(".")
        say(f"megatron-vp: error: {said}{'' if said.endswith('?') else '; see --help'}")
        status = 2
    except UserError as error:
        say(f"megatron-vp: error: {error}")
        status = 2
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
