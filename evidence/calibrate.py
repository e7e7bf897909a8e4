"""Fit the cost model's constants to published figures, and validate the fit.

    python evidence/calibrate.py

Prints the constants that fit the paper's tables, and the errors with which they predict the pass times and table 3. For
cross-validation, the script repeats the fit once per setup (table, number of GPUs, sequence length), without the cells
of that setup, and once more without any cell of table 5 on 16 GPUs. It prints the errors for the cells that were left
out. Finally the script fits the constants to published runs on H100. It prints the constants' 90 % confidence
intervals, and the errors for these runs with three sets of constants: current, fitted to all runs, and fitted without
the predicted run's family (runs of one model that differ mainly in the number of GPUs). The script takes two or three
minutes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.calibration import fit, known_to_fit, leave_out, report
from evidence.public_fit import PublicFit, fit_to_public_runs
from megatron_vp.cli.result_output import progress_lines


def main() -> None:
    """Run the script."""
    cells = known_to_fit()
    setups = sorted({cell.setup for cell in cells})
    parts = [*setups, (5, 16)]
    progress, fitted = progress_lines(), count(1)
    constants = fit(cells)
    left_out = leave_out(cells, parts, lambda: progress("fitting", next(fitted), len(parts)))
    found = fit_to_public_runs(partial(progress, "predicting published runs"), len(os.sched_getaffinity(0)))
    lines = [
        f"constants fitted to results of the paper: {len(cells)} cells of tables 5 and 6 ({len(setups)} setups), pass "
        "times on 8 GPUs, and table 3",
        "",
    ]
    lines += [
        *report(constants),
        "",
        "mean and largest error, in percent, of cells that were left out of the fit",
    ]
    lines.append(f"  {'cells':38}{'':>6}{'MFU':>14}{'memory':>14}")
    for entry in left_out:
        names = zip(("table {}", "{} GPUs", "sequence {}"), entry.part, strict=False)
        name = ", ".join(text.format(number) for text, number in names)
        mfu, memory = ("{:6.2f} {:6.2f}".format(*pair) for pair in (entry.mfu, entry.memory))
        lines.append(f"  {name:38}{entry.cells:6}{mfu:>14}{memory:>14}")
    print("\n".join([*lines, "", *public_lines(found)]))


def public_lines(found: PublicFit) -> list[str]:
    """Lines with the result of the fit to the published H100 runs."""
    lines = [
        f"{found.runs} published H100 runs in {found.families} families (runs of one model that differ mainly in the "
        "number of GPUs)"
    ]
    lines.append("current constants, and their 90 percent confidence intervals from these runs")
    for each in found.intervals:
        lines.append(f"  {each.name:20}{each.value:9.4g}   {each.low:.4g} to {each.high:.4g} {each.unit}")
    lines.append(
        "mean and largest error in percent with three sets of constants: current, fitted to all runs, and fitted "
        "without the predicted run's family"
    )
    for row in zip(found.present, found.fitted, found.left_out, strict=True):
        errors = "".join(f"{100 * each.mean:9.1f} {100 * each.worst:5.1f}" for each in row)
        lines.append(f"  {row[0].group:16}{row[0].runs:4}{errors}")
    return lines


if __name__ == "__main__":
    main()
