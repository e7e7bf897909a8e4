"""Draws charts of predicted time and memory: for all runs of a plan or a search, or for every rank under one plan."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from megatron_vp.cost.layers.shapes import Recompute
from megatron_vp.schedule.draw import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatron_vp.cost.planning.evaluation import Evaluation
    from megatron_vp.cost.planning.search import Search

GIB = 2**30
PARTS = {
    "parameters": "#4C78A8",
    "gradients": "#59A14F",
    "optimizer": "#B6C95B",
    "activations": "#F28E2B",
    "vocabulary": "#E15759",
    "communication": "#B07AA1",
    "outside": "#BAB0AC",
}


def rank_chart(evaluation: Evaluation, limit: float, title: str) -> bytes:
    """Draw a PNG with one row per rank: its computing and waiting time, and what its memory contains."""
    from matplotlib.figure import Figure

    plan = evaluation.candidate.plan
    figure = Figure(figsize=(11, 0.26 * len(evaluation.busy) + 1.8), layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    _entitle(figure, f"{title}\n{plan.label}, {evaluation.candidate.method}")
    rows = range(len(evaluation.busy))
    makespan = evaluation.iteration_seconds - evaluation.loss.step
    times.barh(rows, evaluation.busy, color="#59A14F", label="computes")
    waits = [makespan - busy for busy in evaluation.busy]
    times.barh(rows, waits, left=evaluation.busy, color="#BAB0AC", label="waits")
    step = [evaluation.loss.step] * len(rows)
    times.barh(rows, step, left=makespan, color="#B07AA1", label="after the passes")
    times.set_yticks(rows, [f"rank {rank}" for rank in rows])
    times.invert_yaxis()
    times.set_xlabel("seconds per iteration")
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        widths = [rank.parts()[part] / GIB for rank in evaluation.memory]
        memory.barh(rows, widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    memory.set_yticks(rows, [""] * len(rows))
    memory.set_ylim(times.get_ylim())
    memory.set_xlabel(f"peak memory in GiB{_limit(memory, limit)}")
    return _png(figure)


def runs_chart(search: Search, chosen: Evaluation, title: str) -> bytes:
    """Draw a PNG of iteration time against memory, with the frontier and the recommended run. Runs are coloured by
    pipeline size or, if all have the same, by schedule. Slow runs are left out.
    """
    from matplotlib.figure import Figure

    jobs, best = [each.job for each in search.tried], search.frontier
    one_size = len({job.pipeline for job in jobs}) == 1

    def group(each: Evaluation) -> str:
        pipeline = jobs[each.variant].pipeline
        return each.candidate.plan.schedule if one_size else f"{pipeline:3d} pipeline rank{'s' * (pipeline > 1)}"

    def words(each: Evaluation) -> str:
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
