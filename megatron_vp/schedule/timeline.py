"""Simulates a schedule with given costs to find bubbles, activation memory, and times of passes and communication."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.dependencies import build_graph, check_passes, join_pairs, join_vocabulary_passes
from megatron_vp.schedule.graph import Step, gc_paused
from megatron_vp.schedule.ledger import levels, peaks
from megatron_vp.schedule.node_times import NodeTimes, durations, node_times
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.transfers import Operation

Span = tuple[float, float]
"""Start and end."""


def rounded(time: float) -> float:
    """Round to nine significant digits."""
    return float(f"{time:.9g}")


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule. `spans[r][k]` is the start and end of the k-th pass of rank r."""

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    nodes: NodeTimes = field(compare=False, repr=False)

    @cached_property
    def operations(self) -> dict[Operation, Span]:
        """Start and end of every communication operation."""
        named = zip(self.nodes.graph.nodes, zip(self.nodes.start, self.nodes.end, strict=True), strict=True)
        return {node: span for node, span in named if not isinstance(node, Step)}

    @cached_property
    def makespan(self) -> float:
        """End of the last pass on any rank."""
        return max(rank[-1][1] for rank in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time for which each rank computes."""
        return tuple(sum(end - start for start, end in rank) for rank in self.spans)

    @cached_property
    def bubble_fraction(self) -> float:
        """Fraction of the makespan during which a rank is idle, averaged over ranks."""
        whole = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def peak_activation(self) -> tuple[float, ...]:
        """Peak activations of each rank; the unit is the activations of one microbatch in all chunks of the rank."""
        return tuple(most / self.schedule.chunks for most in peaks(self.schedule, Held.ACTIVATIONS))

    @cached_property
    def peak_host(self) -> tuple[float, ...]:
        """Peak of each rank's activations in host memory, in the unit of `peak_activation`."""
        return tuple(most / self.schedule.chunks for most in peaks(self.schedule, Held.HOST_ACTIVATIONS))

    def held(self, rank: int, held: Held) -> list[tuple[float, float]]:
        """The times at which the rank's activations change, each with the new level in the unit of `peak_activation`.
        Times are rounded to nine significant digits, which keeps files small.
        """
        changes = [(0.0, 0.0)]
        for span, pieces in zip(self.spans[rank], levels(self.schedule.ranks[rank], held), strict=True):
            for time, level in zip(span, pieces, strict=True):
                if level / self.schedule.chunks != changes[-1][1]:
                    changes.append((rounded(time), level / self.schedule.chunks))
        return changes[1:]


class Simulator:
    """Simulates a schedule with one or more sets of costs.

    A communicator's operations run in the order in which they become ready under the constructor's `costs`. Every
    simulation keeps this order, because the lowered programs fix it. With `one_queue`, copies share one hardware queue
    with the passes; see `Graph.link_one_queue`. Raises ScheduleError for a missing, repeated or unexpected pass, and
    for an order that deadlocks.
    """

    @gc_paused()
    def __init__(self, schedule: Schedule, costs: Costs, one_queue: bool = False) -> None:
        check_passes(schedule)
        self.schedule, self._graph = schedule, build_graph(schedule)
        self._orders = self._graph.numbers(schedule.ranks)
        if schedule.vocab is VocabMethod.INTERLACED:
            join_vocabulary_passes(self._graph, self._orders)
        join_pairs(self._graph, schedule)
        if one_queue:
            self._graph.link_one_queue(self._orders)
        self._order = node_times(self._graph, self._orders, durations(self._graph, schedule, costs)).order
        latest: dict[int, int] = {}
        for number in self._order:
            lane = self._graph.lanes[number]
            if lane in latest:
                self._graph.predecessors[number].append(latest[lane])
            latest[lane] = number

    @gc_paused()
    def simulate(self, costs: Costs) -> Timeline:
        """Simulate with `costs`; every pass starts as early as its rank and its dependencies allow."""
        took, before = durations(self._graph, self.schedule, costs), self._graph.predecessors
        start, end = [0.0] * len(took), [0.0] * len(took)
        for number in self._order:
            begin = 0.0
            for earlier in before[number]:
                if end[earlier] > begin:
                    begin = end[earlier]
            start[number] = begin
            end[number] = begin + took[number]
        spans = tuple(tuple((start[number], end[number]) for number in order) for order in self._orders)
        return Timeline(self.schedule, costs, spans, NodeTimes(self._graph, start, end, self._order))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule; every pass starts as early as its rank and its dependencies allow.

    Communication occupies a communicator, not a rank. Each communicator runs its operations one after another. All V
    passes of a microbatch start together. Raises ScheduleError for a missing, repeated or unexpected pass, and for an
    order that deadlocks.
    """
    costs = costs or PassCosts()
    return Simulator(schedule, costs).simulate(costs)
