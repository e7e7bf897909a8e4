"""Makes an HTML page that works offline and shows one timeline, or two timelines one above the other."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from megatron_vp.schedule import draw
from megatron_vp.schedule.graph import Step
from megatron_vp.schedule.ledger import activation_levels
from megatron_vp.schedule.pass_kinds import Held, PassKind
from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.timeline import Span, Timeline


def to_html(timelines: Sequence[Timeline], window: Span | None = None) -> str:
    """Make the page. All timelines share a time axis, which initially shows `window` (start, end) or everything."""
    styles = _styles(timelines)
    places = {(style["kind"], style["chunk"]): place for place, style in enumerate(styles)}
    start, end = window or (0.0, max(timeline.makespan for timeline in timelines))
    page = {
        "from": start,
        "until": end if end > start else start + 1,
        "peak": max(max(*each.peak_activation, *each.peak_host) for each in timelines),
        "host_colour": draw.COPIES,
        "styles": styles,
        "schedules": [_schedule(timeline, places) for timeline in timelines],
    }
    folder = files("megatron_vp.schedule")
    text, script = (folder.joinpath(f"web_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    parts = {
        "TITLE": escape(" and ".join(draw.title(timeline.schedule) for timeline in timelines)),
        # Escape "<", so that a schedule's name cannot end the HTML element that holds the data.
        "PAGE": json.dumps(page, separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": script,
    }
    return re.sub("|".join(parts), lambda part: parts[part[0]], text)


def _styles(timelines: Sequence[Timeline]) -> list[dict[str, object]]:
    """Colour and legend text for each pass kind on each chunk, for communication, and for activations on the device.
    The legend omits entries without text.
    """
    used = {(step.kind, step.chunk) for each in timelines for order in each.schedule.ranks for step in order}
    chunked = any(timeline.schedule.chunks > 1 for timeline in timelines)
    styles: list[dict[str, object]] = []
    for kind, chunk in sorted(used, key=lambda item: (list(PassKind).index(item[0]), item[1])):
        meaning = f"{kind} {kind.meaning}" + (f", chunk {chunk}" if chunked and kind.per_chunk else "")
        styles.append({"kind": kind.value, "chunk": chunk, "colour": draw.shade(kind, chunk), "meaning": meaning})
    categories = {operation.category for each in timelines for operation in each.operations}
    for category, colour, meaning in (
        ("collective", draw.SECOND_STREAM, "collectives"),
        ("copy", draw.COPIES, "copies to and from the host (a line of this color shows activations in host memory)"),
        ("message", "", ""),
    ):
        if category in categories:
            styles.append({"kind": category, "chunk": 0, "colour": colour, "meaning": meaning})
    return [*styles, {"kind": "", "chunk": 0, "colour": "#9a9a9a", "meaning": "activations held on the device"}]


def _schedule(timeline: Timeline, places: dict[tuple[object, object], int]) -> dict[str, object]:
    """A timeline as JSON data: nodes for each rank's passes in order, followed by nodes for communication.

    A node is a list: name, index of its style, rank (None for a collective), start, end, indices of the nodes that it
    waits for, and index of the previous node on its rank or communicator (None if it is the first).
    """
    schedule, (graph, start, end) = timeline.schedule, timeline.nodes
    steps = [number for order in graph.numbers(schedule.ranks) for number in order]
    passes = set(steps)
    numbers = steps + [number for number in range(len(start)) if number not in passes]
    place_of = {number: place for place, number in enumerate(numbers)}
    names = list(range(schedule.pipeline_size))
    nodes = []
    for number in numbers:
        node = graph.nodes[number]
        needed = [place_of[each] for each in graph.predecessors[number]]
        # The simulator has appended the lane's previous node, if there is one, as the last predecessor.
        has_turn = needed and graph.lanes[numbers[needed[-1]]] == graph.lanes[number]
        turn = needed.pop() if has_turn else None
        times = _rounded(start[number]), _rounded(end[number])
        if isinstance(node, Step):
            assert isinstance(node.action, Pass)
            nodes.append(
                [str(node.action), places[node.action.kind, node.action.chunk], node.rank, *times, needed, turn]
            )
        else:
            rank = None if node.track is None else node.track[0]
            nodes.append([node.words(names), places[node.category, 0], rank, *times, needed, turn])
    return {
        "title": draw.title(schedule),
        "figures": f"makespan {timeline.makespan:.6g}, bubble {100 * timeline.bubble_fraction:.2f} %, "
        f"peak activations of {max(timeline.peak_activation):.4g} microbatches"
        + (f" on the device and of {max(timeline.peak_host):.4g} in host memory" if schedule.offloaded else ""),
        "makespan": timeline.makespan,
        "ranks": schedule.pipeline_size,
        "members": list(schedule.vocab_members),
        "passes": len(steps),
        "nodes": nodes,
        "memory": _levels(timeline, Held.ACTIVATIONS),
        "host": _levels(timeline, Held.HOST_ACTIVATIONS) if schedule.offloaded else None,
    }


def _levels(timeline: Timeline, held: Held) -> list[list[list[float]]]:
    """For each rank, the times at which its activation memory changes, each with the new level in microbatches."""
    found = []
    for rank, spans in enumerate(timeline.spans):
        changes: list[list[float]] = []
        for (start, end), (during, after) in zip(spans, activation_levels(timeline.schedule, rank, held), strict=True):
            for time, level in ((start, during), (end, after)):
                if level != (changes[-1][1] if changes else 0.0):
                    changes.append([_rounded(time), level])
        found.append(changes)
    return found


def _rounded(time: float) -> float:
    """Round to nine significant digits, which keeps the file small."""
    return float(f"{time:.9g}")
