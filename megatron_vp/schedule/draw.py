"""Draws a timeline as text, as a picture (SVG or PNG), or as a trace for Perfetto. `web_page` uses the same styles."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_vp.schedule import perfetto
from megatron_vp.schedule.dependencies import OFFLOAD_KINDS
from megatron_vp.schedule.pass_kinds import Held, PassKind
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.timeline import Timeline
from megatron_vp.schedule.transfers import category_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECOND_STREAM = "#303030"
COPIES = "#2A6FDB"
HELD = "#9A9A9A"


class Style(NamedTuple):
    """How pictures show the passes of one kind on one chunk, or one category of communication."""

    kind: str
    chunk: int
    colour: str
    meaning: str
    """the legend's text; entries without text are not in legends"""


COMMUNICATION = (
    Style("collective", 0, SECOND_STREAM, "collectives"),
    Style("copy", 0, COPIES, "copies to and from the host"),
    Style("message", 0, "", ""),
)

WIDTH = 13.0
"""Width of a picture in inches; viewers would scale down a wider one. Seven entries of the legend fit."""


def to_text(timeline: Timeline) -> str:
    """Return metrics, and a table with a line per rank."""
    schedule = timeline.schedule
    costs = timeline.costs.nominal(schedule.pipeline_size)
    more = {"activation in host memory": bool(schedule.offloaded), "pairs": bool(schedule.pairs)}
    rows = [["rank", "busy", "bubble %", "peak activation", *(name for name, shown in more.items() if shown)]]
    for rank, busy in enumerate(timeline.busy):
        idle = 100 * (1 - busy / timeline.makespan) if timeline.makespan else 0.0
        rows.append([f"{rank}", f"{busy:.6g}", f"{idle:.2f}", f"{timeline.peak_activation[rank]:.4g}"])
        if schedule.offloaded:
            rows[-1].append(f"{timeline.peak_host[rank]:.4g}")
        if schedule.pairs:
            rows[-1].append(f"{len(schedule.pairs[rank])}")
    lines = [
        f"schedule {title(schedule)}",
        f"makespan {timeline.makespan:.6g}   bubble {100 * timeline.bubble_fraction:.2f} %   "
        f"costs {' '.join(f'{name}={value:g}' for name, value in costs.named().items())}",
        "",
        *aligned(rows),
    ]
    return "\n".join(lines) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.rjust, row, widths)) for row in rows]


def saved(figure: Figure, file_format: str = "png") -> bytes:
    """A picture in a file's format; equal pictures give equal SVG files, which get no date."""
    out = io.BytesIO()
    figure.savefig(out, format=file_format, dpi=150, metadata={"Date": None} if file_format == "svg" else None)
    return out.getvalue()


def figures(timeline: Timeline) -> str:
    """The makespan and the bubble."""
    return f"makespan {timeline.makespan:.6g}, bubble {100 * timeline.bubble_fraction:.2f} %"


def title(schedule: Schedule) -> str:
    """A schedule's name, vocabulary method, and numbers of ranks, chunks and microbatches."""
    name = f"{schedule.name} ({schedule.shape})" if schedule.shape else schedule.name
    chunks = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    ranks, holders = schedule.pipeline_size, schedule.vocab_ranks
    some = "" if len(holders) in (0, ranks) else f" on rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders))}"
    return (
        f"{name}, vocabulary {schedule.vocab}{some}: {ranks} ranks, {chunks} per rank, "
        f"{schedule.microbatches} microbatches"
    )


def to_picture(timeline: Timeline, file_format: str) -> bytes:
    """Draw the timeline as `svg` or `png`.

    Each rank has a row of passes and, below it, a chart of the activations held. Passes that are wide enough show their
    microbatch. Lines below the passes show the rank's collectives and copies, except those of zero duration.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    ranks, makespan = range(schedule.pipeline_size), timeline.makespan or 1.0
    points_per_unit = 72 * (WIDTH - 1) / makespan
    lines: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for operation, (start, end) in timeline.operations.items():
        for rank in operation.members(schedule.vocab_members) if end > start else ():
            lines[rank, category_of(operation)].append((start, end - start))
    # Equal schedules give equal files, so an SVG file gets a fixed hash salt. Text is stored as text, not outlines.
    with rc_context({"svg.hashsalt": "megatron-vp", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(WIDTH, 1.1 + 0.55 * len(ranks)), layout="constrained")
        axes = figure.add_subplot()
        peak = max(*timeline.peak_activation, *timeline.peak_host) or 1.0
        for rank, order in enumerate(schedule.ranks):
            bars = [(start, end - start) for start, end in timeline.spans[rank]]
            colours = [shade(step.kind, step.chunk) for step in order]
            edge = 0.4 if points_per_unit > 4 else 0.0
            axes.broken_barh(bars, (rank, 0.56), facecolors=colours, edgecolors="white", linewidths=edge)
            for place, step in enumerate(order):
                if step.kind is PassKind.F and (rank, step) in schedule.partners:
                    pair = (bars[place][0], bars[place][1] + bars[place + 1][1])
                    axes.broken_barh(
                        [pair], (rank, 0.56), facecolors="none", edgecolors=SECOND_STREAM, linewidth=2 * edge
                    )
            for step, (start, wide) in zip(order, bars, strict=True):
                label = str(step.microbatch)
                # Draw the label only if it fits: in the smallest legible font size, a digit is 3.6 points wide.
                if wide * points_per_unit >= 3.6 * len(label) + 1:
                    axes.text(
                        start + wide / 2, rank + 0.28, label, ha="center", va="center", fontsize=5.5, clip_on=True
                    )
            for held, colour in ((Held.ACTIVATIONS, HELD), (Held.HOST_ACTIVATIONS, COPIES)):
                changes = [*timeline.held(rank, held), (makespan, 0.0)]
                times, tops = [time for time, _ in changes], [rank + 0.92 - 0.28 * level / peak for _, level in changes]
                if held is Held.ACTIVATIONS:
                    axes.fill_between(times, tops, rank + 0.92, step="post", color=colour, linewidth=0)
                elif schedule.offloaded:
                    axes.step(times, tops, where="post", color=colour, linewidth=0.8)
        for style, top, tall in zip(COMMUNICATION, (0.575, 0.625), (0.045, 0.03), strict=False):
            for rank in ranks:
                axes.broken_barh(lines[rank, style.kind], (rank + top, tall), color=style.colour, linewidth=0)
        axes.set_xlim(0.0, makespan)
        axes.set_ylim(len(ranks), -0.12)
        axes.set_yticks([rank + 0.28 for rank in ranks], [f"rank {rank}" for rank in ranks])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        host = "; blue line: in host memory" if schedule.offloaded else ""
        pairs = "; framed: two passes run as one" if schedule.pairs else ""
        axes.set_xlabel(f"time; grey below each rank: activations held (at most {peak:.4g} microbatches){host}{pairs}")
        axes.set_title(f"{title(schedule)}; {figures(timeline)}", loc="left", fontsize=9)
        shown = {*PassKind, *(category for (_, category), bars in lines.items() if bars)}
        legend = [style for style in styles([timeline]) if style.meaning and style.kind in shown]
        patches = [Patch(facecolor=style.colour, label=style.meaning) for style in legend]
        figure.legend(handles=patches, loc="outside lower center", ncols=7, frameon=False, fontsize=7)
        return saved(figure, file_format)


def shade(kind: PassKind, chunk: int) -> str:
    """The colour of a kind's passes as #RRGGBB, paler for chunks with higher numbers."""
    channels = bytes.fromhex(kind.colour.removeprefix("#"))
    return "#" + bytes(round(255 - (255 - channel) * 0.6**chunk) for channel in channels).hex()


def styles(timelines: Sequence[Timeline]) -> list[Style]:
    """The styles of the timelines' passes, and of communication. O and R take no time, so legends leave them out."""
    used = {(step.kind, step.chunk) for each in timelines for order in each.schedule.ranks for step in order}
    chunked = any(timeline.schedule.chunks > 1 for timeline in timelines)
    found = []
    for kind, chunk in sorted(used, key=lambda item: (list(PassKind).index(item[0]), item[1])):
        meaning = f"{kind} {kind.meaning}" + (f", chunk {chunk}" if chunked and kind.per_chunk else "")
        found.append(Style(kind.value, chunk, shade(kind, chunk), "" if kind in OFFLOAD_KINDS else meaning))
    return [*found, *COMMUNICATION]


def to_perfetto(timeline: Timeline) -> str:
    """Chrome trace events for Perfetto, with one process per rank; one unit of cost becomes one millisecond.

    The lanes and names are those of a recorded run: passes are in `compute`, collectives in the `second stream` of
    every member, and copies in `copies`. Two passes that run as one are one slice.
    """
    schedule, events = timeline.schedule, []
    copies = [Lane.COPIES] if schedule.offloaded else []
    for rank, (order, spans) in enumerate(zip(schedule.ranks, timeline.spans, strict=True)):
        events += perfetto.process(rank, Lane.COMPUTE, Lane.SECOND_STREAM, *copies)
        for place, (step, (start, end)) in enumerate(zip(order, spans, strict=True)):
            args: dict[str, object] = {"microbatch": step.microbatch, "chunk": step.chunk}
            name, category, partner = str(step), step.kind.value, schedule.partners.get((rank, step))
            if partner is not None:
                if step.kind is PassKind.F:
                    continue
                name, category, start = f"{partner}|{step}", "F|B", spans[place - 1][0]
            events.append(perfetto.slice_event(rank, Lane.COMPUTE, name, category, start, end, args))
    lanes = {"collective": Lane.SECOND_STREAM, "copy": Lane.COPIES}
    for operation, (start, end) in timeline.operations.items():
        category, args = category_of(operation), {"microbatch": operation.microbatch}
        for rank in operation.members(schedule.vocab_members) if category in lanes else ():
            events.append(perfetto.slice_event(rank, lanes[category], str(operation), category, start, end, args))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
