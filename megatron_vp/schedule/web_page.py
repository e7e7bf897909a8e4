"""Makes an HTML page that works offline and shows one timeline, or two timelines one above the other."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from megatron_vp.schedule import draw
from megatron_vp.schedule.graph import Step
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.timeline import Timeline, rounded
from megatron_vp.schedule.transfers import Collective, category_of


def to_html(timelines: Sequence[Timeline]) -> str:
    """Make the page. All timelines share a time axis."""
    styles = [*draw.styles(timelines), draw.Style("", 0, draw.HELD, "activations held on the device")]
    if any(timeline.schedule.offloaded for timeline in timelines):
        styles.append(draw.Style("", 0, draw.COPIES, "activations in host memory"))
    places: dict[tuple[str, int], int] = {style[:2]: place for place, style in enumerate(styles)}
    page = {
        "peak": max(max(*each.peak_activation, *each.peak_host) for each in timelines),
        "host_colour": draw.COPIES,
        "styles": [style._asdict() for style in styles],
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


def _schedule(timeline: Timeline, places: dict[tuple[str, int], int]) -> dict[str, object]:
    """A timeline as JSON data: nodes for each rank's passes in order, followed by nodes for communication.

    A node is a list: name, index of its style, rank (None for a collective), start, end, indices of the nodes that it
    waits for, and index of the previous node on its rank or communicator (None if it is the first).
    """
    schedule, (graph, start, end, _) = timeline.schedule, timeline.nodes
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
        times = rounded(start[number]), rounded(end[number])
        if isinstance(node, Step):
            assert isinstance(node.action, Pass)
            partner = schedule.partners.get((node.rank, node.action))
            name = f"{node.action}" if partner is None else f"{node.action}, as one with {partner}"
            nodes.append([name, places[node.action.kind, node.action.chunk], node.rank, *times, needed, turn])
        else:
            rank = None if isinstance(node, Collective) else node.members(())[0]
            nodes.append([node.words(names), places[category_of(node), 0], rank, *times, needed, turn])
    return {
        "title": draw.title(schedule),
        "figures": f"{draw.figures(timeline)}, peak activations of {max(timeline.peak_activation):.4g} microbatches"
        + (f" on the device and of {max(timeline.peak_host):.4g} in host memory" if schedule.offloaded else ""),
        "makespan": timeline.makespan,
        "ranks": schedule.pipeline_size,
        "members": list(schedule.vocab_members),
        "passes": len(steps),
        "nodes": nodes,
        "memory": [timeline.held(rank, Held.ACTIVATIONS) for rank in names],
        "host": [timeline.held(rank, Held.HOST_ACTIVATIONS) for rank in names] if schedule.offloaded else None,
    }
