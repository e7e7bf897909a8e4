"""Plays a schedule against pass costs: when everything starts and ends, bubbles, activation memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_vp.schedule.collector import collector_paused
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.dependencies import Graph, Step, build_graph, check_passes, join_vocabulary_passes
from megatron_vp.schedule.instructions import Loss, Operation
from megatron_vp.schedule.passes import PassKind, Schedule, ScheduleError, VocabMethod

Span = tuple[float, float]
"""Start and end."""

Moment = tuple[float, int]
"""Time, and a number that keeps dependent events of the same time apart."""


@dataclass(frozen=True)
class Timeline:
    """`spans[r][k]` are start and end of the k-th pass of rank r; `operations` those of every communication."""

    schedule: Schedule
    costs: PassCosts
    spans: tuple[tuple[Span, ...], ...]
    operations: dict[Operation, Span]

    @cached_property
    def makespan(self) -> float:
        """End of the last pass on any rank; the first pass starts at 0."""
        return max(end for rank in self.spans for _, end in rank)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each rank computes."""
        return tuple(sum(end - start for start, end in rank) for rank in self.spans)

    @cached_property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in [0, makespan] in which they do not compute."""
        whole = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def peak_activation(self) -> tuple[float, ...]:
        """Most activations held at once on each rank, in microbatches of a whole rank: see `activation_levels`."""
        return tuple(
            max((during for during, _ in self.activation_levels(rank)), default=0.0) for rank in range(len(self.spans))
        )

    def activation_levels(self, rank: int) -> list[tuple[float, float]]:
        """Activations held during and after each pass of `rank`, in microbatches of a whole rank.

        A chunk holds 1/chunks from the start of its F to the end of its B, or of its W where the backward is split;
        without a backward, during its F only.
        """
        release = PassKind.W if self.schedule.split_backward else PassKind.B
        release = release if self.schedule.has_backward else PassKind.F
        levels, held, chunks = [], 0, self.schedule.chunks
        for step in self.schedule.ranks[rank]:
            during = held + (step.kind is PassKind.F)
            held = during - (step.kind is release)
            levels.append((during / chunks, held / chunks))
        return levels

    @cached_property
    def between_s_and_t(self) -> tuple[int, ...]:
        """Most microbatches that are at once past the start of S and not yet past the end of T, on each rank."""
        peaks = []
        for order in self.schedule.ranks:
            held = peak = 0
            for step in order:
                held += step.kind is PassKind.S
                peak = max(peak, held)
                held -= step.kind is (PassKind.T if self.schedule.has_backward else PassKind.S)
            peaks.append(peak)
        return tuple(peaks)


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


def durations(graph: Graph, schedule: Schedule, costs: PassCosts) -> list[float]:
    """Duration of every node: passes by their kind, communication by its latency, the loss function nothing."""
    by_kind = {kind: costs.duration(kind, schedule.chunks, schedule.split_backward) for kind in PassKind}
    return [
        costs.comm
        if not isinstance(node, Step)
        else 0.0
        if isinstance(node.action, Loss)
        else by_kind[node.action.kind]
        for node in graph.nodes
    ]


def next_on_rank(graph: Graph, orders: Sequence[Sequence[int]]) -> list[int | None]:
    """For every node the step that its rank runs next, None for the last and for communication."""
    following: list[int | None] = [None] * len(graph.nodes)
    for order in orders:
        for before, after in pairwise(order):
            following[before] = after
    return following


def play(graph: Graph, orders: Sequence[Sequence[int]], took: Sequence[float]) -> Playback:
    """Start every node as soon as what it waits for has ended and, for the steps in `orders`, the rank is free.

    `orders[r]` are the numbers of rank r's steps. Raises ScheduleError where the order cannot proceed.
    """
    waits = [len(before) for before in graph.predecessors]
    following = next_on_rank(graph, orders)
    for after in following:
        if after is not None:
            waits[after] += 1
    start, end = [0.0] * len(waits), [0.0] * len(waits)
    ready = deque(number for number, count in enumerate(waits) if not count)
    done: list[int] = []
    while ready:
        number = ready.popleft()
        done.append(number)
        end[number] = finish = start[number] + took[number]
        after = following[number]
        for successor in graph.successors[number] if after is None else [*graph.successors[number], after]:
            start[successor] = max(start[successor], finish)
            waits[successor] -= 1
            if not waits[successor]:
                ready.append(successor)
    if len(done) < len(waits):
        raise ScheduleError(_deadlock_message(graph, orders, set(done)))
    return Playback(start, end, done)


def _deadlock_message(graph: Graph, orders: Sequence[Sequence[int]], done: set[int]) -> str:
    stuck, around = [], []
    for rank, order in enumerate(orders):
        place = next((k for k, number in enumerate(order) if number not in done), None)
        if place is None:
            continue
        missing = [str(graph.nodes[before]) for before in graph.predecessors[order[place]] if before not in done]
        stuck.append(f"{graph.nodes[order[place]]}")
        window = [str(graph.nodes[number].action) for number in order[max(0, place - 4) : place + 5]]
        window[min(4, place)] = f">{window[min(4, place)]}<"
        around.append(f"  rank {rank}: ... {' '.join(window)} ...   waits for {', '.join(missing) or 'nothing'}")
    return "\n".join([f"deadlock: no rank can go on; stuck are {', '.join(stuck)}", *around])


@collector_paused()
def simulate(schedule: Schedule, costs: PassCosts | None = None) -> Timeline:
    """Times of every pass in the given order, each as early as its rank and its dependencies allow.

    Communication does not occupy a rank: an operation starts when its last input is ready and takes `costs.comm`. The
    Vs of a microbatch start together.
    Raises ScheduleError for a missing, repeated or foreign pass and for an order that cannot proceed.
    """
    costs = costs or PassCosts()
    check_passes(schedule)
    graph = build_graph(schedule)
    orders = [[graph.index[Step(rank, step)] for step in order] for rank, order in enumerate(schedule.ranks)]
    if schedule.vocab is VocabMethod.INTERLACED:
        join_vocabulary_passes(graph, orders)
    times = play(graph, orders, durations(graph, schedule, costs))
    spans = tuple(tuple((times.start[number], times.end[number]) for number in order) for order in orders)
    operations = {
        node: (times.start[number], times.end[number])
        for number, node in enumerate(graph.nodes)
        if not isinstance(node, Step)
    }
    return Timeline(schedule, costs, spans, operations)
