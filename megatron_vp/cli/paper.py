"""`megatron-vp paper`: everything about the paper's tables, predicted or run; `megatron-vp tables` is an alias."""

from __future__ import annotations

import typer

from megatron_vp.cli import paper_calibrate, paper_public, paper_runs, paper_tables


def register(app: typer.Typer) -> None:
    """Add the group to `app`, and `tables` as an alias of its command."""
    group = typer.Typer(rich_markup_mode=None)
    paper_tables.register(group)
    paper_runs.register(group)
    paper_calibrate.register(group)
    paper_public.register(group)
    app.add_typer(group, name="paper", help="Predict or reproduce the paper's tables.")
    paper_tables.register(app, "Short form of `megatron-vp paper tables`.")
