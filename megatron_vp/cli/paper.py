"""`megatron-vp paper`: predict or reproduce the paper's tables; `megatron-vp tables` is short for `paper tables`."""

from __future__ import annotations

import typer

from megatron_vp.cli import paper_runs, paper_tables


def register(app: typer.Typer) -> None:
    """Add the command group `paper` to `app`, and also add the group's command `tables` directly to `app`."""
    group = typer.Typer(rich_markup_mode=None)
    paper_tables.register(group)
    paper_runs.register(group)
    app.add_typer(group, name="paper", help="Predict or reproduce the paper's tables.")
    paper_tables.register(app, "Short form of `megatron-vp paper tables`.")
