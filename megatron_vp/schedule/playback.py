"""Runs the nodes of a graph in time: each as soon as what it waits for has ended and its lane is free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.dependencies import Graph, Step
from megatron_vp.schedule.instructions import Loss, Operation, communicator
from megatron_vp.schedule.passes import Schedule, ScheduleError

Moment = tuple[float, int]
"""Time, and a number that keeps dependent events of the same time apart."""


@dataclass(frozen=True, slots=True)
class Playback:
    """Times of the nodes of a graph, and `order`, in which each node comes after all that it waits for."""

    start: list[float]
    end: list[float]
    order: list[int]

    def moments(self, times: list[float]) -> list[Moment]:
        """`times` of all nodes as moments: what depends on another node has a later moment, even at the same time."""
        position = [0] * len(self.order)
        for place, number in enumerate(self.order):
            position[number] = place
        return list(zip(times, position, strict=True))


class Durations:
    """How to look the duration of every node up: nodes that take the same time by their nature are asked for once."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self._schedule = schedule
        self._kinds: dict[tuple, int] = {}
        self._examples: list[Step | Operation] = []
        self._kind_of = [self._kind(node) for node in graph.nodes]

    def __call__(self, costs: Costs) -> list[float]:
        """Duration of every node; the loss function takes none."""
        known = [self._duration(node, costs) for node in self._examples]
        return [known[kind] for kind in self._kind_of]

    def _kind(self, node: Step | Operation) -> int:
        if isinstance(node, Step):
            action = node.action
            key = (node.rank, Loss) if isinstance(action, Loss) else (node.rank, action.kind, action.chunk)
        else:
            key = node[:1] + communicator(node)
        kind = self._kinds.setdefault(key, len(self._examples))
        if kind == len(self._examples):
            self._examples.append(node)
        return kind

    def _duration(self, node: Step | Operation, costs: Costs) -> float:
        if not isinstance(node, Step):
            return costs.communication(node)
        return 0.0 if isinstance(node.action, Loss) else costs.duration(self._schedule, node.rank, node.action)


def lane_of(node: Step | Operation) -> int | tuple:
    """What runs one node at a time: the rank of a step, the communicator of an operation."""
    return node.rank if isinstance(node, Step) else communicator(node)


def next_on_rank(graph: Graph, orders: Sequence[Sequence[int]]) -> list[int | None]:
    """For every node the step that its rank runs next, None for the last and for communication."""
    following: list[int | None] = [None] * len(graph.nodes)
    for order in orders:
        for before, after in pairwise(order):
            following[before] = after
    return following


def play(graph: Graph, orders: Sequence[Sequence[int]], took: Sequence[float]) -> Playback:
    """Start every node as soon as what it waits for has ended and its lane is free.

    A rank is the lane of its steps: `orders[r]` are the numbers of rank r's, in order. A communicator is the lane of
    its operations, which run one after another, in the order in which they become ready: that is the order in which
    lowering has them issued. Raises ScheduleError where the order cannot proceed.
    """
    waits = [len(before) for before in graph.predecessors]
    following = next_on_rank(graph, orders)
    for after in following:
        if after is not None:
            waits[after] += 1
    start, end = [0.0] * len(waits), [0.0] * len(waits)
    nodes = graph.nodes
    free: dict[tuple, float] = defaultdict(float)
    ready = [(0.0, number) for number, count in enumerate(waits) if not count]
    done: list[int] = []
    while ready:
        _, number = heappop(ready)
        done.append(number)
        if isinstance(nodes[number], Step):
            end[number] = finish = start[number] + took[number]
        else:
            lane = communicator(nodes[number])
            start[number] = max(start[number], free[lane])
            end[number] = finish = free[lane] = start[number] + took[number]
        after = following[number]
        for successor in graph.successors[number] if after is None else [*graph.successors[number], after]:
            start[successor] = max(start[successor], finish)
            waits[successor] -= 1
            if not waits[successor]:
                heappush(ready, (start[successor], successor))
    if len(done) < len(waits):
        raise ScheduleError(_deadlock_message(graph, orders, set(done)))
    return Playback(start, end, done)


def _deadlock_message(graph: Graph, orders: Sequence[Sequence[int]], done: set[int]) -> str:
    """First line: steps that wait for each other in a circle, or the first of them; then every rank that is stuck."""
    heads = {}
    around = []
    for rank, order in enumerate(orders):
        place = next((k for k, number in enumerate(order) if number not in done), None)
        if place is None:
            continue
        heads[rank] = order[place]
        missing = [str(graph.nodes[before]) for before in graph.predecessors[order[place]] if before not in done]
        window = [str(graph.nodes[number].action) for number in order[max(0, place - 4) : place + 5]]
        window[min(4, place)] = f">{window[min(4, place)]}<"
        around.append(f"  rank {rank}: ... {' '.join(window)} ...   waits for {', '.join(missing) or 'nothing'}")
    return "\n".join([f"deadlock: {_circle(graph, orders, done, heads)}", *around])


def _circle(graph: Graph, orders: Sequence[Sequence[int]], done: set[int], heads: dict[int, int]) -> str:
    listed = {number for order in orders for number in order}

    def awaited(number: int) -> int:
        """The step that was not run and keeps this one from running."""
        number = next(before for before in graph.predecessors[number] if before not in done)
        return number if number in listed else awaited(number)

    waits: dict[int, str] = {}
    head = next(iter(heads.values()))
    while head not in waits:
        step = awaited(head)
        following = heads[graph.nodes[step].rank]
        behind = "" if step == following else f", which comes after {graph.nodes[following].action}"
        waits[head] = f"{graph.nodes[head]} waits for {graph.nodes[step]}{behind}"
        head = following
    circle = list(waits.values())[list(waits).index(head) :]
    return "; ".join(circle[:4]) + ("; ..." if len(circle) > 4 else "")
