"""Find the shortest order of a schedule's passes within a given memory with OR-tools' CP-SAT, for small schedules.

The model contains the passes and operations of `build_graph`, their durations, and the limits that our generators keep.
A rank runs one pass at a time, and a communicator one operation. Every start is a variable, the makespan is minimised,
and the given schedule is the first guess.

All microbatches are equal. If the passes of one rank, kind and chunk are sorted by time and numbered in that order, no
dependency or limit is violated. The model therefore prescribes this order from the start. The order excludes solutions
only for schedules with pairs (see `Nominal.pairs`), whose microbatches differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from math import gcd

from ortools.sat.python import cp_model

from megatron_vp.schedule import Costs, Held, Pass, PassKind, Schedule, VocabMethod, validate
from megatron_vp.schedule.dependencies import join_vocabulary_passes
from megatron_vp.schedule.ledger import lives
from megatron_vp.schedule.list_scheduler import MemoryLimits
from megatron_vp.schedule.node_times import durations, node_times
from megatron_vp.schedule.reorder import linked_graph

GRID = 400
"""Durations must be multiples of 1/GRID, because the solver computes with integers."""

Pairs = Sequence[Sequence[tuple[Pass, Pass]]]


@dataclass(frozen=True)
class Shortest:
    """The schedule that the solver found, timed by our simulator, and the bound that it proved."""

    schedule: Schedule
    makespan: float
    bound: float
    """No order within the limits takes less time."""

    @property
    def proven(self) -> bool:
        """Whether it is proven that no shorter order exists."""
        return self.makespan <= self.bound + 1e-6


def shortest(schedule: Schedule, limits: MemoryLimits, pairs: Pairs, costs: Costs, effort: float) -> Shortest:
    """Find the shortest order of the passes of `schedule` within `limits`.

    The solver stops after about `effort` seconds on one core. It counts steps instead of seconds, so the result does
    not depend on the machine. Raises ValueError for durations off the grid, and ScheduleError if the found order is not
    valid, which means that the model is wrong.
    """
    model = _Model(schedule, costs)
    model.run_one_at_a_time(pairs)
    model.keep_microbatches_in_order()
    for rank, limit in enumerate(limits.activations):
        model.limit_memory(rank, Held.ACTIVATIONS, limit)
        model.limit_memory(rank, Held.LOGITS, limits.logits)
    found, bound = model.solve(effort)
    timeline = validate(found, costs, [limit / schedule.chunks for limit in limits.activations])
    return Shortest(found, timeline.makespan, max(bound, *timeline.busy))


class _Model:
    """The solver's model, with variables indexed by the numbers of the graph's nodes. Times are multiples of `unit`."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.graph = schedule, linked_graph(schedule)
        self.orders, self.nodes = self.graph.numbers(schedule.ranks), self.graph.nodes
        took = durations(self.graph, schedule, costs)
        steps = [round(duration * GRID) for duration in took]
        for duration, step in zip(took, steps, strict=True):
            if abs(duration * GRID - step) > 1e-6:
                raise ValueError(f"a duration of {duration} is not a multiple of 1/{GRID}")
        common = reduce(gcd, steps) or 1
        self.unit, self.took = common / GRID, [step // common for step in steps]
        self._guess()
        self.model = cp_model.CpModel()
        latest = int(max(self.guess.end))
        self.start = [self.model.new_int_var(0, latest, "") for _ in self.took]
        self.end = [start + took for start, took in zip(self.start, self.took, strict=True)]
        self.makespan = self.model.new_int_var(0, latest, "makespan")
        for number, start in enumerate(self.start):
            self.model.add(self.end[number] <= self.makespan)
            self.model.add_hint(start, int(self.guess.start[number]))
            for before in self.graph.predecessors[number]:
                self.model.add(start >= self.end[before])

    def _guess(self) -> None:
        """Compute the start times of the given order, which are the solver's first guess."""
        graph = self.graph
        if self.schedule.vocab is VocabMethod.INTERLACED:
            graph = linked_graph(self.schedule)
            join_vocabulary_passes(graph, self.orders)
        self.guess = node_times(graph, self.orders, self.took)

    def run_one_at_a_time(self, pairs: Pairs) -> None:
        """Forbid that two passes of a rank, or two operations of a communicator, overlap.

        The backward of a pair follows its forward with nothing in between. From the start of a V's broadcast, which
        waits for all ranks, until the end of that V, a rank runs nothing else.
        """
        backward_of: dict[int, int] = {}
        if pairs:
            forwards, backwards = (self.graph.numbers([[pair[k] for pair in each] for each in pairs]) for k in (0, 1))
            for each in zip(forwards, backwards, strict=True):
                backward_of |= zip(*each, strict=True)
        second = set(backward_of.values())
        lanes = defaultdict(list)
        for number, took in enumerate(self.took):
            if number in second or not (took or number in backward_of):
                continue
            first, last = number, backward_of.get(number, number)
            if last != first:
                self.model.add(self.start[last] >= self.end[first])
            if self.graph.kinds[number] is PassKind.V:
                (first,) = self.graph.predecessors[number]
                self.model.add(self.start[number] == self.end[first])
            lanes[self.graph.lanes[number]].append(self._interval(first, last))
        for intervals in lanes.values():
            self.model.add_no_overlap(intervals)

    def _interval(self, first: int, last: int) -> cp_model.IntervalVar:
        """The interval from the start of a node to the end of the same or another node."""
        if first == last:
            return self.model.new_fixed_size_interval_var(self.start[first], self.took[first], "")
        length = self.model.new_int_var(self.took[first], int(max(self.guess.end)), "")
        return self.model.new_interval_var(self.start[first], length, self.end[last], "")

    def keep_microbatches_in_order(self) -> None:
        """Let nodes that differ only in their microbatch run in the order of microbatches."""
        alike = defaultdict(list)
        for node, number in zip(self.graph.nodes, range(len(self.took)), strict=True):
            alike[_without_microbatch(node)].append(number)
        for numbers in alike.values():
            for before, after in pairwise(numbers):
                self.model.add(self.start[after] >= self.end[before])

    def limit_memory(self, rank: int, held: Held, limit: int) -> None:
        """Let a rank hold this kind of memory for at most `limit` passes at a time."""
        numbers = self.orders[rank]
        found = lives(self.schedule.ranks[rank], held)
        if len(found) > limit:
            intervals = [self._interval(numbers[first], numbers[last]) for first, last in found]
            self.model.add_cumulative(intervals, [1] * len(intervals), limit)

    def solve(self, effort: float) -> tuple[Schedule, float]:
        """Return the schedule that was found, and the lower bound."""
        self.model.minimize(self.makespan)
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = effort
        solver.parameters.num_workers = 1
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            # The effort was not enough to confirm even the first guess, which does not mean that the guess is invalid.
            assert status == cp_model.UNKNOWN, f"the given order is not possible: {solver.status_name(status)}"
            return self.schedule, 0.0
        place = {number: position for position, number in enumerate(self.guess.order)}
        ranks = []
        for order in self.orders:
            # Among passes that start at the same time, those that take no time come first, then those that are earlier
            # in the given order.
            order = sorted(order, key=lambda n: (solver.value(self.start[n]), self.took[n], place[n]))
            ranks.append(tuple(self.nodes[number].action for number in order))
        return replace(self.schedule, ranks=tuple(ranks)), solver.best_objective_bound * self.unit


def _without_microbatch(node: object) -> object:
    if hasattr(node, "action"):
        return node.rank, node.action.kind, node.action.chunk
    return node._replace(microbatch=0)
