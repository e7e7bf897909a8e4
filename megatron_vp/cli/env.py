"""`megatron-vp env`: which parts are active here, which are missing, and what that costs."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("env")(env)


def env() -> None:
    """List the parts that a run would use on this machine, and what the missing ones cost.

    Run it where the job runs: in an srun or an interactive allocation, not on a login node.
    """
    from rich.console import Console
    from rich.table import Table

    from megatron_vp.mcore.platform.environment import parts

    table = Table("part", "found here", "what its absence means", box=None, pad_edge=False)
    for part in parts():
        table.add_row(part.name, part.found or "missing", "" if part.found else part.without)
    Console().print(table)
