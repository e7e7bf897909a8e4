"""Formats `--help`: commands are grouped by task, and each command shows an example of its output."""

from __future__ import annotations

from importlib.resources import files

import typer
from typer.core import TyperGroup

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
