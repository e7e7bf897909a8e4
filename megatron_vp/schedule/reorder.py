"""Shortens a schedule, given its real costs, by reordering its passes within its memory limits.

A list scheduler that works forwards in time shortens the warm-up but not the cool-down; one that works backwards does
the opposite. A result can be improved by running the scheduler on it again, in the other direction or with modified
pass durations. Which run is best depends on the schedule and its costs, so several results are compared. The shortest
is used, or the given order if no result is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.dependencies import VOCABULARY_KINDS, build_graph, join_pairs
from megatron_vp.schedule.graph import Graph, Link, Node, Step
from megatron_vp.schedule.interlaced import EMBEDDED_AHEAD, expand_interlaced
from megatron_vp.schedule.list_scheduler import ListScheduler, MemoryLimits, memory_of
from megatron_vp.schedule.node_times import durations, node_times
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

SMALL = 1_000
"""For schedules with at most this many nodes (passes and operations), more orders are compared."""

LARGE = 40_000
"""For schedules with copies to the host and at least this many nodes, only `first_orders` are compared."""

EMBEDDING_GRADIENTS = 4
"""Largest number of microbatches whose embedding gradients may wait for IB."""


def reorder_for_costs(
    schedule: Schedule,
    limits: MemoryLimits,
    costs: Costs,
    pairs: Sequence[Sequence[tuple[Pass, Pass]]] = (),
    further_orders: bool = True,
    links: Sequence[Link] = (),
) -> Schedule:
    """Reorder the passes of `schedule` within `limits` to shorten it under `costs`. The given order must already
    respect `limits`.

    `pairs[r]` are pairs of passes of rank r; the second pass of a pair stays right after the first. `links` are
    additional dependencies: the second node of each waits for the first. Without `further_orders`, only
    `Search.first` are compared.
    """
    graph = linked_graph(schedule, links)
    search = Search(schedule, limits, costs, graph, pairs)
    found = [*search.first, *(search.further_orders() if further_orders else ())]
    while True:
        shortest = min(makespan for makespan, _ in found)
        best = next(each for each in found if each[0] <= shortest * (1 + 1e-9))
        # Data is read and losses are reported in order, so no microbatch may overtake another.
        if best is found[0] or all(earlier < later for earlier, later in _neighbours(best[1], graph)):
            break
        found.remove(best)
    ranks = []
    for numbers, steps, order in zip(search.given, schedule.ranks, best[1], strict=True):
        named = dict(zip(numbers, steps, strict=True))
        ranks.append(tuple(named[number] for number in order))
    partners = schedule.partners
    joined = [
        tuple((step, partners[rank, step]) for step in order if step.kind is PassKind.F and (rank, step) in partners)
        for rank, order in enumerate(ranks if partners else ())
    ]
    return replace(schedule, ranks=tuple(ranks), pairs=tuple(joined))


def linked_graph(schedule: Schedule, links: Sequence[Link] = ()) -> Graph:
    """The graph of the dependencies that a reordered `schedule` must keep; `links` are additional ones.

    In a schedule for evaluation, microbatches keep their order.
    """
    # Without vocabulary passes, leave the loss out of the graph, as published schedules do.
    graph = build_graph(schedule, with_loss=schedule.vocab is not VocabMethod.NONE)
    if not schedule.has_backward:
        for before, after in _neighbours(graph.numbers(schedule.ranks), graph):
            graph.link(before, after)
    for earlier, later in (*_limits(schedule), *links):
        graph.link(graph.number_of_pass(*earlier), graph.number_of_pass(*later))
    join_pairs(graph, schedule)
    return graph


Orders = Sequence[Sequence[int]]
"""For each rank, the node numbers of its passes, in the order in which they run."""
Found = tuple[float, Orders]
"""Makespan and orders."""


class Search:
    """Tries orders of a schedule's passes within memory limits; `graph` is the `linked_graph` of a schedule with the
    same passes.

    `first` are the given order, and two that the list scheduler makes from it, one forwards and one backwards in time.
    Makespans are always computed with the real durations, `times`. With `even` durations, F, B and W take equally long.
    """

    def __init__(
        self,
        schedule: Schedule,
        limits: MemoryLimits,
        costs: Costs,
        graph: Graph,
        pairs: Sequence[Sequence[tuple[Pass, Pass]]] = (),
    ) -> None:
        self.graph, self.limits, self.sharded = graph, limits, schedule.vocab.is_sharded
        self.given = graph.numbers(schedule.ranks)
        self.memory = memory_of(schedule.ranks, self.given)
        halves = (chain(*graph.numbers([[pair[half] for pair in each] for each in pairs])) for half in (0, 1))
        self.backward_of = dict(zip(*halves, strict=True))
        self.times, self.even = (durations(graph, schedule, each) for each in (costs, costs.evened()))
        self.first: tuple[Found, ...] = (self._timed(self.given), *self.both_ways(self.times))

    def further_orders(self) -> list[Found]:
        """Results of further runs of the list scheduler, which start from its first results and from the given order.

        A list scheduler starts any ready pass, even if this delays a more urgent pass that is about to become ready.
        With `even` durations, passes become ready exactly when they are needed, and the resulting order has only short
        waits under the real durations. If there are vocabulary passes, the scheduler also finds an order as if these
        passes took no time, and improves that order in a run backwards in time with the real durations.

        To save time, a schedule with more than `SMALL` nodes gets only one more run. With vocabulary passes, this run
        goes backwards from `forwards` or, if `backwards` is longer, forwards from `backwards`. Without vocabulary
        passes, the run uses even durations. A schedule of this size that copies activations to the host gets two more
        runs instead of one: backwards from `forwards`, and forwards from `backwards`. With `LARGE` or more nodes, it
        gets none.
        """
        _, forwards, backwards = self.first
        uneven = self.even != self.times
        if len(self.times) <= SMALL:
            again = self.again(forwards, backwards, self.times)
            if self.sharded:
                kinds = zip(self.graph.kinds, self.times, strict=True)
                free = [0.0 if kind in VOCABULARY_KINDS else took for kind, took in kinds]
                again.append(self.run(self.run(self.given, free, False)[1], self.times, True))
            if uneven:
                evened = self.both_ways(self.even)
                again += [*evened, *self.again(*evened, self.even)]
            return again
        if self.graph.posted_behind:
            return self.again(forwards, backwards, self.times) if len(self.times) < LARGE else []
        if self.sharded:
            longer = max(forwards, backwards, key=lambda found: found[0])
            return [self.run(longer[1], self.times, longer is forwards)]
        return [self.run(self.given, self.even, backwards[0] < forwards[0])] if uneven else []

    def both_ways(self, durations: Sequence[float]) -> tuple[Found, Found]:
        """Run the list scheduler on the given order, forwards and backwards in time."""
        return self.run(self.given, durations, False), self.run(self.given, durations, True)

    def again(self, forwards: Found, backwards: Found, durations: Sequence[float]) -> list[Found]:
        """Run the list scheduler in the other direction: backwards from `forwards`, and forwards from `backwards`."""
        return [self.run(forwards[1], durations, True), self.run(backwards[1], durations, False)]

    def run(self, given: Orders, durations: Sequence[float], backwards: bool) -> Found:
        """The order that the list scheduler finds for `durations`, and its makespan under the real durations (`times`).

        If the pairs in `backward_of` cause a deadlock, the result is the given order with an infinite makespan.
        """
        scheduler = ListScheduler(self.graph, given, durations, self.memory, self.limits, self.backward_of, backwards)
        makespan, orders = scheduler.run()
        if makespan == math.inf:
            return makespan, given
        return self._timed(orders) if durations is not self.times or self.graph.posted_behind else (makespan, orders)

    def _timed(self, orders: Orders) -> Found:
        return max(node_times(self.graph, orders, self.times).end), orders


def evaluation(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The passes of `schedule.forward_only()`, reordered for evaluation; an interlaced schedule becomes vocab-1."""
    forward = expand_interlaced(schedule).forward_only()
    return reorder_for_costs(
        forward, MemoryLimits((forward.microbatches,) * forward.pipeline_size), costs or PassCosts()
    )


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """The forward passes of `schedule` for any number of microbatches, one microbatch after another."""
    ranks = []
    for rank, stages in enumerate(schedule.placement.stage_of):
        single = schedule.vocab.passes if rank in schedule.vocab_ranks else ()
        chunks = {kind: [0] for kind in single} | {PassKind.F: sorted(range(len(stages)), key=stages.__getitem__)}
        # The kinds are listed in the order in which a microbatch's forward passes run.
        steps = [(kind, chunk) for kind in PassKind if kind.forward for chunk in chunks.get(kind, ())]
        ranks.append(tuple(Pass(kind, place, chunk) for place in range(microbatches) for kind, chunk in steps))
    return replace(schedule, microbatches=microbatches, ranks=tuple(ranks), pairs=())


def _limits(schedule: Schedule) -> Iterator[Link]:
    """Yield the steps that a reordered schedule must keep in this order, although the second does not need the first.

    IF runs only a few microbatches ahead of the first stage's F, and IB only a few behind the first stage's backward. A
    chunk's W of microbatch 0 runs before all whole backwards of the chunk.
    """
    first, chunk = schedule.placement.first_rank, schedule.placement.chunk_of(0)
    for rank in schedule.vocab_ranks if schedule.vocab.is_sharded else ():
        for earlier, later in enumerate(range(EMBEDDED_AHEAD, schedule.microbatches)):
            yield (first, Pass(PassKind.F, earlier, chunk)), (rank, Pass(PassKind.IF, later))
        backwards = schedule.microbatches if schedule.has_backward else 0
        for earlier, later in enumerate(range(EMBEDDING_GRADIENTS, backwards)):
            whole = Pass(PassKind.BW, later, chunk)
            freed = whole if (first, whole) in schedule.whole_backwards else whole._replace(kind=PassKind.B)
            yield (rank, Pass(PassKind.IB, earlier)), (first, freed)
    for rank, step in schedule.whole_backwards:
        start = Pass(PassKind.W, 0, step.chunk)
        # The sum of a chunk's weight gradients over microbatches starts with microbatch 0.
        if (rank, start._replace(kind=PassKind.BW)) not in schedule.whole_backwards:
            yield (rank, start), (rank, step)


def _neighbours(orders: Orders, graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the node numbers of each pair of successive forwards of one rank, kind and chunk. Later microbatches have
    larger node numbers.
    """

    def same(node: Node) -> tuple[PassKind, int] | None:
        action = node.action if isinstance(node, Step) else None
        return (action.kind, action.chunk) if isinstance(action, Pass) and action.kind.forward else None

    keys = graph.of_nodes(same)
    for order in orders:
        before: dict[tuple[PassKind, int], int] = {}
        for number in order:
            key = keys[number]
            if key is not None:
                if key in before:
                    yield before[key], number
                before[key] = number
