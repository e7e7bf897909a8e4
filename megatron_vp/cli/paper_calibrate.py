"""`megatron-vp paper calibrate`: where the cost model's constants come from, and how well they predict."""

from __future__ import annotations

import typer

from megatron_vp.cli.result_output import progress_bar


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("calibrate", short_help="Fit and validate the cost model's constants.")(calibrate)


def calibrate() -> None:
    """Fit the cost model's constants to the published cells that come with the package, and validate them.

    Prints the constants, the errors of pass times and of table 3, and, for every setup (table, GPUs, sequence length)
    and for all of table 5 on 16 GPUs, the errors of its cells with constants fitted to the others alone. Takes a minute
    or two.
    """
    from megatron_vp.cost.paper.calibration import fit, known_to_fit, leave_out, report

    cells = known_to_fit()
    setups = sorted({cell.setup for cell in cells})
    parts = [*setups, (5, 16)]
    with progress_bar() as progress:
        task = progress.add_task("fitting", total=1 + len(parts))
        constants = fit(cells)
        progress.update(task, advance=1)
        left_out = leave_out(cells, parts, lambda: progress.update(task, advance=1))
    lines = [f"fitted on {len(cells)} published cells, {len(setups)} setups, pass times on 8 GPUs and table 3", ""]
    lines += [
        *report(constants),
        "",
        "predicted by constants fitted without them: mean and largest error in percent",
    ]
    lines.append(f"  {'cells':38}{'':>6}{'MFU':>14}{'memory':>14}")
    for entry in left_out:
        names = zip(("table {}", "{} GPUs", "sequence {}"), entry.part, strict=False)
        name = ", ".join(text.format(number) for text, number in names)
        mfu, memory = ("{:6.2f} {:6.2f}".format(*pair) for pair in (entry.mfu, entry.memory))
        lines.append(f"  {name:38}{entry.cells:6}{mfu:>14}{memory:>14}")
    typer.echo("\n".join(lines))
