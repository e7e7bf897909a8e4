"""Draws a timeline as text, as a picture (SVG or PNG), or as a trace for Perfetto. `web_page` uses the same styles."""

from __future__ import annotations

import io
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_vp.schedule import perfetto
from megatron_vp.schedule.dependencies import OFFLOAD_KINDS
from megatron_vp.schedule.pass_kinds import Held, PassKind
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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

WIDEST = 16.0
"""Largest width of a picture in inches; viewers would scale down a wider one."""


def to_text(timeline: Timeline, width: int = 100) -> str:
    """Return metrics, a table with a line per rank, and a text chart in `width` columns."""
    schedule = timeline.schedule
    costs = timeline.costs.nominal(schedule.pipeline_size)
    rows = [
        ["rank", "busy", "bubble %", "peak activation", "microbatches between S and T", "activation in host memory"]
    ]
    for rank, busy in enumerate(timeline.busy):
        idle = 100 * (1 - busy / timeline.makespan) if timeline.makespan else 0.0
        peaks = f"{timeline.peak_activation[rank]:.4g}", f"{timeline.logits_in_flight[rank]}"
        rows.append([f"{rank}", f"{busy:.6g}", f"{idle:.2f}", *peaks, f"{timeline.peak_host[rank]:.4g}"])
    lines = [
        f"schedule {title(schedule)}",
        f"makespan {timeline.makespan:.6g}   bubble {100 * timeline.bubble_fraction:.2f} %   "
        f"costs {' '.join(f'{name}={value:g}' for name, value in costs.named().items())}",
        "",
        *aligned([row[: 6 if schedule.offloaded else 5] for row in rows]),
    ]
    column = timeline.makespan / width
    marks = "".join(f"{kind.mark} is {kind}, " for kind in PassKind if _needs_explaining(kind, schedule.kinds))
    legend = f"one column is {column:.4g} time units; shorter passes may be invisible; {marks}a dot is idle time"
    lines += ["", legend]
    middles = [(place + 0.5) * column for place in range(width)]
    lines += [f"{rank:4d} {_row(timeline, rank, middles)}" for rank in range(schedule.pipeline_size)]
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
    return (
        f"{name}, vocabulary {_vocabulary(schedule)}: {schedule.pipeline_size} ranks, {chunks} per rank, "
        f"{schedule.microbatches} microbatches"
    )


def _vocabulary(schedule: Schedule) -> str:
    holders = schedule.vocab_ranks
    if len(holders) in (0, schedule.pipeline_size):
        return schedule.vocab.value
    return f"{schedule.vocab} on rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders))}"


def _needs_explaining(kind: PassKind, used: Collection[PassKind]) -> bool:
    """Whether the legend must explain the kind's mark; a mark that is the name of a kind explains itself."""
    return kind.mark not in PassKind and (kind in used or kind in (PassKind.IF, PassKind.IB))


def _row(timeline: Timeline, rank: int, times: Sequence[float]) -> str:
    """One character per entry of `times`: the mark of the pass that the rank runs at that time, or a dot."""
    spans, order = timeline.spans[rank], timeline.schedule.ranks[rank]
    starts = [start for start, _ in spans]
    cells = []
    for time in times:
        place = bisect_right(starts, time) - 1
        busy = place >= 0 and spans[place][1] > time
        cells.append(order[place].kind.mark if busy else ".")
    return "".join(cells)


def to_picture(timeline: Timeline, file_format: str) -> bytes:
    """Draw the timeline as `svg` or `png`.

    Each rank has a row of passes and, below it, a chart of the activations held. Passes that are wide enough show their
    microbatch. A line below the passes shows the rank's collectives, except those of zero duration.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    schedule = timeline.schedule
    ranks, makespan = schedule.pipeline_size, timeline.makespan or 1.0
    width = min(WIDEST, max(9.0, 0.13 * makespan / _typical_duration(timeline) + 2))
    # Equal schedules give equal files, so an SVG file gets a fixed hash salt. Text is stored as text, not outlines.
    with rc_context({"svg.hashsalt": "megatron-vp", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(width, 1.1 + 0.55 * ranks), layout="constrained")
        axes = figure.add_subplot()
        peak = max(*timeline.peak_activation, *timeline.peak_host)
        lines = defaultdict(list)
        for operation, (start, end) in timeline.operations.items():
            for rank in operation.members(schedule.vocab_members) if end > start else ():
                lines[operation.category, rank].append((start, end - start))
        for rank in range(ranks):
            _draw_passes(axes, timeline, rank, points_per_unit=72 * (width - 1) / makespan)
            for style, top, height in zip(COMMUNICATION, (0.575, 0.625), (0.045, 0.03), strict=False):
                spans = lines.get((style.kind, rank), ())
                axes.broken_barh(spans, (rank + top, height), facecolor=style.colour, linewidth=0)
            _draw_memory(axes, timeline, rank, peak)
        axes.set_xlim(0.0, makespan)
        axes.set_ylim(ranks, -0.12)
        axes.set_yticks([rank + 0.28 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        host = "; blue line: in host memory" if schedule.offloaded else ""
        axes.set_xlabel(f"time; grey below each rank: activations held (at most {peak:.4g} microbatches){host}")
        axes.set_title(f"{title(schedule)}; {figures(timeline)}", loc="left", fontsize=9)
        timed = {category for category, _ in lines}
        _add_legend(figure, [each for each in styles([timeline]) if each.kind in PassKind or each.kind in timed], width)
        return saved(figure, file_format)


def _typical_duration(timeline: Timeline) -> float:
    """Mean duration of rank 0's passes that take time; 1 if there are none."""
    taken = [end - start for start, end in timeline.spans[0] if end > start]
    return sum(taken) / len(taken) if taken else 1.0


def shade(kind: PassKind, chunk: int) -> str:
    """The colour of a kind's passes as #RRGGBB, paler for chunks with higher numbers."""
    channels = bytes.fromhex(kind.colour.removeprefix("#"))
    return "#" + bytes(round(255 - (255 - channel) * 0.6**chunk) for channel in channels).hex()


def styles(timelines: Sequence[Timeline]) -> list[Style]:
    """The styles that the timelines need. O and R take no time, so legends leave them out."""
    used = {(step.kind, step.chunk) for each in timelines for order in each.schedule.ranks for step in order}
    chunked = any(timeline.schedule.chunks > 1 for timeline in timelines)
    found = []
    for kind, chunk in sorted(used, key=lambda item: (list(PassKind).index(item[0]), item[1])):
        meaning = f"{kind} {kind.meaning}" + (f", chunk {chunk}" if chunked and kind.per_chunk else "")
        found.append(Style(kind.value, chunk, shade(kind, chunk), "" if kind in OFFLOAD_KINDS else meaning))
    categories = {operation.category for each in timelines for operation in each.operations}
    return found + [style for style in COMMUNICATION if style.kind in categories]


def _draw_passes(axes: Axes, timeline: Timeline, rank: int, points_per_unit: float) -> None:
    boxes = defaultdict(list)
    for step, (start, end) in zip(timeline.schedule.ranks[rank], timeline.spans[rank], strict=True):
        boxes[step.kind, step.chunk].append((start, end - start))
        label = str(step.microbatch)
        # Draw the label only if it fits: in the smallest legible font size, a digit is 3.6 points wide.
        if (end - start) * points_per_unit >= 3.6 * len(label) + 1:
            middle = (start + end) / 2
            axes.text(middle, rank + 0.28, label, ha="center", va="center", fontsize=5.5, color="black", clip_on=True)
    for (kind, chunk), spans in boxes.items():
        line = 0.4 if points_per_unit > 4 else 0.0
        axes.broken_barh(spans, (rank, 0.56), facecolor=shade(kind, chunk), edgecolor="white", linewidth=line)


def _draw_memory(axes: Axes, timeline: Timeline, rank: int, peak: float) -> None:
    base = rank + 0.92
    for held in (Held.ACTIVATIONS, *[Held.HOST_ACTIVATIONS] * bool(timeline.peak_host[rank])):
        times, levels = zip((0.0, 0.0), *timeline.held(rank, held), strict=True)
        times, levels = (*times, timeline.makespan), (*levels, levels[-1])
        tops = [base - 0.28 * level / (peak or 1.0) for level in levels]
        if held is Held.ACTIVATIONS:
            axes.fill_between(times, base, tops, step="post", color=HELD, linewidth=0)
            axes.axhline(base, color=HELD, linewidth=0.4)
        else:
            axes.step(times, tops, where="post", color=COPIES, linewidth=0.8)


def _add_legend(figure: Figure, shown: Sequence[Style], width: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=style.colour, label=style.meaning) for style in shown if style.meaning]
    # The widest legend entry takes 1.7 inches.
    rows = math.ceil(1.7 * len(patches) / width)
    columns = math.ceil(len(patches) / rows)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=7)


def to_perfetto(timeline: Timeline) -> str:
    """Chrome trace events for Perfetto, with one process per rank; one unit of cost becomes one millisecond.

    As in a recorded run, passes are in the lane `compute`, and collectives in the lane `second stream` of every member.
    Each link has a lane on the sending rank, and each rank's copies have a lane. Counters show each rank's held
    activations.
    """
    events: list[perfetto.Event] = []
    for rank, (order, spans) in enumerate(zip(timeline.schedule.ranks, timeline.spans, strict=True)):
        events += perfetto.process(rank, Lane.COMPUTE, Lane.SECOND_STREAM)
        for step, (start, end) in zip(order, spans, strict=True):
            args: dict[str, object] = {"microbatch": step.microbatch, "chunk": step.chunk}
            on = Lane[step.kind.lane.upper()]
            events.append(perfetto.slice_event(rank, on, str(step), step.kind.value, start, end, args))
        for held in (Held.ACTIVATIONS, *[Held.HOST_ACTIVATIONS] * bool(timeline.peak_host[rank])):
            events += [perfetto.level(rank, held, time, level) for time, level in timeline.held(rank, held)]
    tracks: dict[str, int] = {}
    for operation, (start, end) in timeline.operations.items():
        args = {"microbatch": operation.microbatch}
        lane: int = Lane.SECOND_STREAM
        ranks = operation.members(timeline.schedule.vocab_members)
        if operation.track is not None:
            rank, title = operation.track
            if operation.lane not in tracks:
                tracks[operation.lane] = Lane.LINKS + len(tracks)
                events.append(perfetto.thread(rank, tracks[operation.lane], title))
            lane, ranks = tracks[operation.lane], [rank]
        events += [
            perfetto.slice_event(rank, lane, str(operation), operation.category, start, end, args) for rank in ranks
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
