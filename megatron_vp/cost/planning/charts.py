"""Draws charts of predicted time and memory: for all runs of a plan or a search, or for every rank under one plan."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_vp.cost.planning.front import frontier
from megatron_vp.cost.sizes.shapes import Recompute
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


class _Dot(NamedTuple):
    """A run: seconds, bytes of the fullest rank, the name of its colour, its description, and whether it is filled."""

    seconds: float
    memory: float
    group: str
    words: str
    filled: bool = True


def plan_chart(evaluations: Sequence[Evaluation], chosen: Evaluation, limit: float, title: str) -> bytes:
    """Draw a PNG of iteration time against memory, with the frontier, the recommended run, and runs coloured by
    schedule. Slow runs are left out.
    """

    def dot(each: Evaluation) -> _Dot:
        plan = each.candidate.plan
        words = f"{plan.label}, {each.candidate.method}" + (", recommended" if each is chosen else "")
        return _Dot(each.iteration_seconds, each.peak_memory, plan.schedule, words, plan.offload_chunks > 0)

    note = "; filled: activations in host memory"
    best = frontier(evaluations)
    named = best if chosen in best else [*best, chosen]
    return _scatter([*map(dot, evaluations)], [*map(dot, best)], limit, title, note, [*map(dot, named)])


def search_chart(search: Search, limit: float, title: str) -> bytes:
    """Draw a PNG of iteration time against memory, with the frontier and with runs coloured by pipeline size. Slow runs
    are left out.
    """

    def dot(each: Evaluation) -> _Dot:
        job, candidate = search.variants[each.variant].job, each.candidate
        parallel = "".join(
            f", {name}-parallel size {size}"
            for size, name in ((job.tensor, "tensor"), (job.context, "context"), (job.expert, "expert"))
            if size > 1
        )
        again = ", with recomputation" if job.recompute is not Recompute.NONE else ""
        group = f"{job.pipeline:3d} pipeline rank{'s' * (job.pipeline > 1)}"
        words = f"{candidate.plan.label}, {candidate.method}{parallel}{again}"
        return _Dot(each.iteration_seconds, each.peak_memory, group, words)

    return _scatter(
        sorted(map(dot, search.found), key=lambda each: each.group), [*map(dot, search.frontier(limit))], limit, title
    )


def _scatter(
    runs: Sequence[_Dot],
    best: Sequence[_Dot],
    limit: float,
    title: str,
    note: str = "",
    named: Sequence[_Dot] | None = None,
) -> bytes:
    """Draw `runs`, the line through the `best`, and the words of `named` (the best if None)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots()
    _entitle(figure, title)
    longest = max(1.05 * best[-1].seconds, 1.1 * best[0].seconds)
    shown = [each for each in runs if each.seconds <= longest]
    for place, name in enumerate(dict.fromkeys(each.group for each in shown)):
        own, colour = [each for each in shown if each.group == name], PIPELINES[place % len(PIPELINES)]
        axes.scatter(
            [each.memory / GIB for each in own],
            [each.seconds for each in own],
            s=22,
            marker="os^"[place // len(PIPELINES) % 3],
            edgecolors=colour,
            facecolors=[colour if each.filled else "none" for each in own],
            label=name.strip(),
        )
    axes.plot(
        [each.memory / GIB for each in best],
        [each.seconds for each in best],
        drawstyle="steps-post",
        color="#555555",
        linewidth=1,
        label="frontier",
        zorder=1,
    )
    for each in best if named is None else named:
        at = each.memory / GIB, each.seconds
        axes.annotate(each.words, at, xytext=(4, -7), textcoords="offset points", fontsize=5)
    most = 1.2 * max(each.memory for each in shown) / GIB
    line = _limit(axes, limit) if limit / GIB < most else ""
    axes.set_xlim(0, most)
    axes.set_xlabel(f"peak memory of the fullest rank in GiB{line}{note}")
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
