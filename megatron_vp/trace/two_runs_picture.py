"""Draws two runs: their loss curves, the difference between the losses, and how each rank spends its time."""

from __future__ import annotations

from megatron_vp.schedule.draw import saved
from megatron_vp.trace.two_runs import TwoRuns


def picture(runs: TwoRuns) -> bytes:
    """Draw a PNG of both runs: the losses with their relative difference, and each rank's busy and waiting time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2), height_ratios=(3, 1))
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above)
    bars = figure.add_subplot(grid[:, 1])
    plain, split = "plain", "vocabulary parallel"
    above.plot(list(runs.plain.losses), list(runs.plain.losses.values()), label=plain, linewidth=4, alpha=0.4)
    above.plot(list(runs.split.losses), list(runs.split.losses.values()), label=split, linewidth=1.2, color="black")
    above.set_ylabel("training loss")
    above.legend()
    differences = runs.differences()
    below.plot(list(differences), list(differences.values()), color="black", linewidth=1)
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("iteration")

    width = 0.4
    for run, name, offset, color in ((runs.plain, plain, -width / 2, "C0"), (runs.split, split, width / 2, "0.2")):
        places = [rank + offset for rank in range(len(run.ranks))]
        busy = [rank.busy_seconds for rank in run.ranks]
        bars.bar(places, busy, width, color=color, label=f"{name}: computes")
        waits = [rank.waiting_seconds for rank in run.ranks]
        bars.bar(places, waits, width, bottom=busy, color=color, alpha=0.25, label=f"{name}: waits")
    bars.set_xticks(range(len(runs.plain.ranks)))
    bars.set_xlabel("pipeline rank")
    bars.set_ylabel("seconds per iteration")
    bars.set_ylim(0, 1.3 * max(run.iteration_seconds for run in (runs.plain, runs.split)))
    bars.legend(ncols=2, fontsize="x-small", loc="upper center")
    return saved(figure)
