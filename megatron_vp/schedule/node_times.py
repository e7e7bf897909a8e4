"""Computes start and end times of a graph's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.graph import Graph, Node, Step
from megatron_vp.schedule.instructions import Loss
from megatron_vp.schedule.passes import Schedule, ScheduleError


class NodeTimes(NamedTuple):
    """Start and end of a graph's nodes, and an `order` of nodes in which each follows all nodes that it waits for."""

    graph: Graph
    start: list[float]
    end: list[float]
    order: list[int]


def durations(graph: Graph, schedule: Schedule, costs: Costs) -> list[float]:
    """Duration of every node, which is the same for all microbatches, except that the backward of a pair is shorter by
    what the pair saves. The loss function takes no time.
    """

    def of(node: Node) -> float:
        if not isinstance(node, Step):
            return costs.communication(schedule, node)
        return 0.0 if isinstance(node.action, Loss) else costs.duration(schedule, node.rank, node.action)

    took = graph.of_nodes(of)
    for rank, pairs in enumerate(schedule.pairs):
        for forward, backward in pairs:
            took[graph.number_of_pass(rank, backward)] -= costs.saved(schedule, rank, forward, backward)
    return took


def node_times(graph: Graph, orders: Sequence[Sequence[int]], took: Sequence[float]) -> NodeTimes:
    """Compute when nodes start and end: each starts as soon as its predecessors have ended and its lane is free.

    The lane of a step is its rank; `orders[r]` lists, in order, the node numbers of rank r's steps. If a call of the
    loss function is not in `orders` and becomes ready during a pass of its rank, it starts right after that pass. The
    lane of an operation is its communicator, which runs operations in the order in which they become ready, because
    lowered programs post them in this order. Operations that involve only one rank, such as copies, run in the order of
    the steps after which they are posted. Raises ScheduleError if the order deadlocks.
    """
    successors, lanes = graph.successors, graph.lanes
    waits = list(map(len, graph.predecessors))
    following: list[int | None] = [None] * len(waits)
    for order in (*orders, *graph.as_posted(orders)):
        for before, after in pairwise(order):
            following[before] = after
            waits[after] += 1
    start, end = [0.0] * len(waits), [0.0] * len(waits)
    free = [0.0] * (1 + max(lanes))
    ready = [(0.0, number) for number, count in enumerate(waits) if not count]
    done: list[int] = []
    while ready:
        begin, number = heappop(ready)
        done.append(number)
        lane = lanes[number]
        if begin < free[lane]:
            start[number] = begin = free[lane]
        end[number] = free[lane] = finish = begin + took[number]
        after_it = following[number]
        for successor in successors[number] if after_it is None else (*successors[number], after_it):
            if start[successor] < finish:
                start[successor] = finish
            waits[successor] -= 1
            if not waits[successor]:
                heappush(ready, (start[successor], successor))
    if len(done) < len(waits):
        raise ScheduleError(f"deadlock: {_circle(graph, orders, set(done))}")
    return NodeTimes(graph, start, end, done)


def _circle(graph: Graph, orders: Sequence[Sequence[int]], done: set[int]) -> str:
    """Describe some steps that wait for each other in a circle."""
    heads = [next((number for number in order if number not in done), -1) for order in orders]

    def awaited(number: int) -> int:
        """A step that has not run and that this node waits for, directly or through operations."""
        number = next(before for before in graph.predecessors[number] if before not in done)
        return number if graph.lanes[number] < graph.ranks else awaited(number)

    waits: dict[int, str] = {}
    head = next(number for number in heads if number >= 0)
    while head not in waits:
        step = awaited(head)
        following = heads[graph.lanes[step]]
        behind = "" if step == following else f", which comes after {graph.nodes[following]}"
        waits[head] = f"{graph.nodes[head]} waits for {graph.nodes[step]}{behind}"
        head = following
    circle = list(waits.values())[list(waits).index(head) :]
    return "; ".join(circle[:4]) + ("; ..." if len(circle) > 4 else "")
