"""Draws a chart of the predicted time and memory of all runs of a plan or a search."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from megatron_vp.cost.layers.shapes import Recompute
from megatron_vp.schedule.draw import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatron_vp.cost.planning.predict import Prediction
    from megatron_vp.cost.planning.search import Search

GIB = 2**30


def runs_chart(search: Search, chosen: Prediction, title: str) -> bytes:
    """Draw a PNG of iteration time against memory, with the frontier and the recommended run. Runs are coloured by
    pipeline size or, if all have the same, by schedule. Slow runs are left out.
    """
    from matplotlib.figure import Figure

    jobs, best = [each.job for each in search.tried], search.frontier
    one_size = len({job.pipeline for job in jobs}) == 1

    def group(each: Prediction) -> str:
        pipeline = jobs[each.variant].pipeline
        return each.candidate.plan.schedule if one_size else f"{pipeline:3d} pipeline rank{'s' * (pipeline > 1)}"

    def words(each: Prediction) -> str:
        job = jobs[each.variant]
        sizes = {"tensor": job.tensor, "context": job.context, "expert": job.expert}
        parallel = [f"{name}-parallel size {size}" for name, size in sizes.items() if size > 1 and len(jobs) > 1]
        again = ["with recomputation"] * (job.recompute is not Recompute.NONE and len(jobs) > 1)
        return ", ".join([each.candidate.name, *parallel, *again, *["recommended"] * (each is chosen)])

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots()
    _entitle(figure, title)
    longest = max(1.05 * best[-1].iteration_seconds, 1.1 * best[0].iteration_seconds)
    shown = [each for each in search.found if each.iteration_seconds <= longest]
    groups = sorted({group(each) for each in shown})
    for place, name in enumerate(groups):
        own, colour = [each for each in shown if group(each) == name], PIPELINES[place % len(PIPELINES)]
        axes.scatter(
            [each.peak_memory / GIB for each in own],
            [each.iteration_seconds for each in own],
            s=22,
            marker="os^"[place // len(PIPELINES) % 3],
            edgecolors=colour,
            facecolors=[colour if each.candidate.plan.offload_chunks else "none" for each in own],
            label=name.strip(),
        )
    points = [each.peak_memory / GIB for each in best], [each.iteration_seconds for each in best]
    axes.plot(*points, drawstyle="steps-post", color="#555555", linewidth=1, label="frontier", zorder=1)
    for run in best if chosen in best else [*best, chosen]:
        at = run.peak_memory / GIB, run.iteration_seconds
        axes.annotate(words(run), at, xytext=(4, -7), textcoords="offset points", fontsize=5)
    most = 1.2 * max(each.peak_memory for each in shown) / GIB
    line = _limit(axes, search.limit) if search.limit / GIB < most else ""
    axes.set_xlim(0, most)
    axes.set_xlabel(f"peak memory of the fullest rank in GiB{line}; filled: activations in host memory")
    axes.set_ylabel("seconds per iteration")
    return _png(figure)


PIPELINES = ("#4C78A8", "#F28E2B", "#59A14F", "#E15759", "#B07AA1", "#9C755F", "#EDC948", "#76B7B2")


def _entitle(figure: Figure, title: str) -> None:
    """Write the lines of `title` above the plots. Lines that are wider than the figure are wrapped."""
    lines = [textwrap.fill(line, 180) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=8, x=0.01, ha="left")


def _limit(axes: Axes, limit: float) -> str:
    """Draw the memory limit, and return what the label of the axis says about it."""
    axes.axvline(limit / GIB, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    return "; dotted line: limit"


def _png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            axes.legend(handles, labels, fontsize=7, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return saved(figure)
