"""`megatron-vp calibrate`: where the cost model's constants come from, and how they predict what they have not seen."""

from __future__ import annotations

import typer

from megatron_vp.cli.output import progress_bar


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("calibrate")(calibrate)


def calibrate() -> None:
    """Fit the cost model's constants to the published cells that come with the package, and validate them.

    Prints the constants, the errors of pass times and of table 3, and, for every setup (table, GPUs, sequence length),
    the errors of its cells with constants fitted to the other setups alone. Takes a minute or two.
    """
    from megatron_vp.cost.calibration import fit, known_to_fit, leave_one_out, report

    cells = known_to_fit()
    setups = {cell.setup for cell in cells}
    with progress_bar() as progress:
        task = progress.add_task("fitting", total=1 + len(setups))
        constants = fit(cells)
        progress.advance(task)
        left_out = leave_one_out(cells, lambda: progress.advance(task))
    lines = [f"fitted on {len(cells)} published cells, {len(setups)} setups, pass times on 8 GPUs and table 3", ""]
    lines += [
        *report(constants),
        "",
        "setups predicted by constants fitted without them: mean and largest error in percent",
    ]
    lines.append(f"  {'setup':38}{'cells':>6}{'MFU':>14}{'memory':>14}")
    for entry in left_out:
        name = "table {}, {} GPUs, sequence {}".format(*entry.setup)
        mfu, memory = ("{:6.2f} {:6.2f}".format(*pair) for pair in (entry.mfu, entry.memory))
        lines.append(f"  {name:38}{entry.cells:6}{mfu:>14}{memory:>14}")
    typer.echo("\n".join(lines))
