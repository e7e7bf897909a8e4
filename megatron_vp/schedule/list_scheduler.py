"""A list scheduler: a free rank runs the first pass of its given order that is ready and fits in memory.

The scheduler works forwards in time from the first pass, or backwards from the last. In a backward run, a pass is ready
when all passes that wait for it have been placed. Passes that no pass waits for (W, IB, T of vocab-2) run in gaps. They
also run if a ready pass does not fit in memory, because they free memory.

A pass may run before earlier passes of the given order if these can still follow, in that order, within the memory
limits. The given order respects the limits, so some rank can always continue, whatever the costs are.

A forward and a backward may form a pair. Both passes of a pair normally wait until the inputs of both are ready, and
then run one right after the other. If the rank has nothing else to run, the first pass does not wait for the second's
inputs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, compress
from operator import add, sub

from megatron_vp.schedule.graph import Graph
from megatron_vp.schedule.ledger import lives
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Pass, PassKind


@dataclass(frozen=True)
class MemoryLimits:
    """The memory limits of a schedule."""

    activations: tuple[int, ...]
    """largest number of chunk activations on each rank's device"""
    logits: int = 2
    """on every rank, the largest number of microbatches whose S has started and whose T has not ended"""
    host: tuple[int, ...] | None = None
    """largest number of chunk activations in each rank's host memory, if chunks are offloaded"""

    def of(self, rank: int) -> dict[Held, int]:
        """The limits of a rank, by kind of memory."""
        limits = {Held.ACTIVATIONS: self.activations[rank], Held.LOGITS: self.logits}
        return limits if self.host is None else limits | {Held.HOST_ACTIVATIONS: self.host[rank]}


Memory = Mapping[Held, Sequence[set[int]]]
"""The passes that allocate each kind of memory and those that free it, as node numbers in the graph."""


def memory_of(ranks: Sequence[Sequence[Pass]], numbers: Sequence[Sequence[int]]) -> Memory:
    """Find the passes that allocate or free each kind of memory. `numbers[r]` are the node numbers of the passes in
    `ranks[r]`.
    """
    found: Memory = {held: (set(), set()) for held in Held}
    for order, named in zip(ranks, numbers, strict=True):
        for held, users in found.items():
            for ends in lives(order, held):
                for passes, place in zip(users, ends, strict=True):
                    passes.add(named[place])
    return found


class _MemoryPool:
    """One kind of memory on one rank (see `Held`). `takes` and `gives` tell which passes allocate and free the memory,
    and `levels` has the amount held during each remaining pass. All these lists are in reverse order: the last entry is
    for the pass that runs first.
    """

    def __init__(self, takes: Sequence[bool], gives: Sequence[bool], limit: int) -> None:
        self.takes, self.limit = takes, limit
        self.change = list(map(sub, takes, gives))
        before = accumulate(reversed(self.change), initial=0)
        self.levels = list(map(add, before, reversed(takes)))
        self.levels.reverse()

    def fits(self, index: int) -> bool:
        """Whether the remaining pass at `index`, which allocates this memory, fits if it runs now, before its turn."""
        return max(self.levels[index + 1 :], default=0) < self.limit

    def remove(self, index: int, place: int) -> None:
        """Remove the remaining pass at `index`, which runs before its turn. `place` is its index among all passes."""
        change = self.change[place]
        if change:
            self.levels[index + 1 :] = [level + change for level in self.levels[index + 1 :]]
        del self.levels[index]


def _pools(order: Sequence[int], memory: Memory, limits: Mapping[Held, int]) -> list[_MemoryPool]:
    """The memory pools of a rank's passes."""
    pools = []
    for held, limit in limits.items():
        takes, gives = (list(map(each.__contains__, order)) for each in memory[held])
        # In a schedule for evaluation, every pass frees what it allocates, so there is nothing to limit.
        if takes != gives:
            pools.append(_MemoryPool(takes, gives, limit))
    return pools


Ready = list[int]
"""A heap of ready passes as negated indices into `_Rank.order`. The order is reversed, so the first pass is on top."""


class _Rank:
    """A rank's remaining passes, as indices into `order`. `order` is reversed: its last pass runs first."""

    def __init__(self, order: Sequence[int], pools: Sequence[_MemoryPool]) -> None:
        self.order, self.pools = order, pools
        self.left = list(range(len(order)))
        # Ready passes that allocate from the same pools share a queue, because if the first does not fit, none fits.
        takes = list(zip(*(pool.takes for pool in pools), strict=True)) if pools else [()] * len(order)
        named = sorted((tuple(compress(range(len(each)), each)), each) for each in set(takes))
        # Each queue is listed with its pools.
        self.queues: list[tuple[list[_MemoryPool], Ready]] = [
            ([pools[place] for place in places], []) for places, _ in named
        ]
        queue_of = {each: queue for (_, each), queue in zip(named, self.queues, strict=True)}
        self.queue_of = [queue_of[each] for each in takes]
        self.fillers: Ready = []
        self.result: list[int] = []
        # Passes that become ready after the next computing pass, each with the queue that it joins.
        self.delayed: list[tuple[Ready, int]] = []
        self.free_at = 0.0
        # If the first pass of a pair has started alone, these are the second pass and the time when the first ends.
        self.half: int | None = None
        self.other_half_ends = 0.0

    def take(self) -> int | None:
        """Choose the pass to run now and return its number; None if no ready pass fits."""
        left, fillers = self.left, self.fillers
        best, chosen = 1, fillers
        for pools, ready in self.queues:
            if ready and ready[0] < best:
                place = -ready[0]
                if left[-1] == place or all(pool.fits(bisect_left(left, place)) for pool in pools):
                    best, chosen = ready[0], ready
                elif fillers and fillers[0] < ready[0]:
                    # `ready[0]` does not fit in memory. Fillers free memory, so first run a filler that is due earlier.
                    best, chosen = fillers[0], fillers
        return self.run(-heappop(chosen)) if chosen else None

    def admit_delayed(self) -> bool:
        """Make the delayed passes ready; return whether there were any."""
        admitted = bool(self.delayed)
        for joins in self.delayed:
            heappush(*joins)
        self.delayed.clear()
        return admitted

    def run(self, place: int) -> int:
        """Run a pass, and return its number."""
        if self.left[-1] == place:
            self.left.pop()
            for pool in self.pools:
                pool.levels.pop()
        else:
            index = bisect_left(self.left, place)
            for pool in self.pools:
                pool.remove(index, place)
            del self.left[index]
        number = self.order[place]
        self.result.append(number)
        return number


class ListScheduler:
    """Simulates the execution of a graph's nodes, forwards or backwards in time. The loss function takes no time, but
    waits for the last rank's current pass.

    `orders[r]` lists the node numbers of rank r's passes in a valid order. `backward_of` maps a forward to the backward
    that runs right after it.
    """

    def __init__(
        self,
        graph: Graph,
        orders: Sequence[Sequence[int]],
        durations: Sequence[float],
        memory: Memory,
        limits: MemoryLimits,
        backward_of: Mapping[int, int],
        backwards: bool,
    ) -> None:
        # A pair is one pass: the forward's number stands for both, and uses the memory of both.
        second, pairs = set(backward_of.values()), backward_of.items()
        if second:
            orders = [[number for number in order if number not in second] for order in orders]
            memory = {
                held: [users | {one for one, two in pairs if two in users} for users in both]
                for held, both in memory.items()
            }
        before, after = graph.predecessors, graph.successors
        if backwards:
            before, after = after, before
            memory = {held: both[::-1] for held, both in memory.items()}
        else:
            orders = [order[::-1] for order in orders]
        self.backwards, self.durations, self.lanes, self.after = backwards, durations, graph.lanes, after
        self.ranks = []
        # The queue that a pass joins when it is ready, and its key in the queue; None for other nodes.
        self.joins: list[tuple[Ready, int] | None] = [None] * len(durations)
        for index, order in enumerate(orders):
            rank = _Rank(order, _pools(order, memory, limits.of(index)))
            self.ranks.append(rank)
            for place, (number, (pools, ready)) in enumerate(zip(order, rank.queue_of, strict=True)):
                self.joins[number] = ready if pools or after[number] else rank.fillers, -place
        self.waits = list(map(len, before))
        # Offloading is useless if a chunk's activations return before the rank has computed anything else. So an R (in
        # reversed time, an O) waits until the rank has computed another pass, if any other pass can run.
        leaving, returning = (
            {number for number, kind in enumerate(graph.kinds) if kind is each} for each in (PassKind.O, PassKind.R)
        )
        self.moves, self.second_moves = leaving | returning, leaving if backwards else returning
        # `halves` maps a pair's number to its two passes in order of time; `pair` maps each of these passes to the
        # pair's number.
        self.halves = {one: (two, one) if backwards else (one, two) for one, two in pairs}
        self.pair = {half: pair for pair, halves in self.halves.items() for half in halves}
        self.losses: deque[int] = deque()
        # `ending` groups nodes by their end time, because many end together. `times` is a heap of these times.
        self.times: list[float] = []
        self.ending: dict[float, list[int]] = {}
        self.lane_free_at = [0.0] * (1 + max(graph.lanes))
        # Ranks that may be able to start a pass. A set of small integers has a reproducible order.
        self.stirred: set[int] = set()
        # Times that differ only by rounding count as equal.
        self.tolerance = 1e-7 * max(durations, default=0.0)

    def run(self) -> tuple[float, list[list[int]]]:
        """Run all nodes; return the makespan and the order found for each rank. These orders respect the limits if the
        given orders do. If the pairs cause a deadlock, the makespan is infinite, and the orders lack some passes.
        """
        for number in [number for number, count in enumerate(self.waits) if not count]:
            self._arrive(number, 0.0)
        self._start_passes(0.0)
        times, ending, lanes, ranks = self.times, self.ending, self.lanes, len(self.ranks)
        while times:
            now = times[0]
            latest = now + self.tolerance
            while times and times[0] <= latest:
                for number in sorted(ending.pop(heappop(times))):
                    if lanes[number] < ranks:
                        self.stirred.add(lanes[number])
                    self._finish(number, now)
            self._start_passes(now)
            if not times:
                self.stirred.update(index for index, rank in enumerate(self.ranks) if rank.admit_delayed())
                self._start_passes(now)
        stuck = any(rank.left for rank in self.ranks)
        assert self.halves or not stuck, "the given order of passes exceeds the memory limits"
        # In backward runs, the halves of a pair and the results are in reverse.
        way = -1 if self.backwards else 1
        orders = [
            [each for number in rank.result for each in self.halves.get(number, (number,))][::way]
            for rank in self.ranks
        ]
        return math.inf if stuck else max(rank.free_at for rank in self.ranks), orders

    def _start_passes(self, now: float) -> None:
        latest, stirred, ranks = now + self.tolerance, self.stirred, self.ranks
        while stirred:
            index = stirred.pop()
            rank = ranks[index]
            if rank.free_at > latest:
                continue
            while self.losses and index == len(ranks) - 1:
                self._finish(self.losses.popleft(), now)
            number = rank.take()
            if number is None:
                self._begin_pair(rank, now)
                continue
            rank.free_at = now
            for each in self.halves.get(number, (number,)):
                rank.free_at += self.durations[each]
                self._end(each, rank.free_at)
            if rank.delayed and number not in self.moves:
                rank.admit_delayed()

    def _begin_pair(self, rank: _Rank, now: float) -> None:
        """If only the first pass of the next pair is ready, run it alone, because the rank has nothing else to run."""
        following = rank.order[rank.left[-1]] if rank.left else None
        if following in self.halves and not self.waits[self.halves[following][0]]:
            first, rank.half = self.halves[rank.run(rank.left[-1])]
            rank.other_half_ends, rank.free_at = now + self.durations[first], math.inf
            self._end(first, rank.other_half_ends)

    def _end(self, number: int, time: float) -> None:
        if time in self.ending:
            self.ending[time].append(number)
        else:
            self.ending[time] = [number]
            heappush(self.times, time)

    def _finish(self, number: int, now: float) -> None:
        waits = self.waits
        for waiting in self.after[number]:
            left = waits[waiting] = waits[waiting] - 1
            if not left:
                self._arrive(waiting, now)

    def _arrive(self, number: int, now: float) -> None:
        """Process node `number`, which no longer waits for other nodes."""
        lane = self.lanes[number]
        if number in self.pair:
            rank = self.ranks[lane]
            if rank.half == number:
                # The first pass of the pair has started alone.
                rank.free_at, rank.half = max(now, rank.other_half_ends) + self.durations[number], None
                self._end(number, rank.free_at)
                return
            self.stirred.add(lane)
            number = self.pair[number]
            if any(self.waits[half] for half in self.halves[number]):
                return
        joins = self.joins[number]
        if joins is not None and number in self.second_moves:
            self.ranks[lane].delayed.append(joins)
        elif joins is not None:
            heappush(*joins)
            self.stirred.add(lane)
        elif lane < len(self.ranks):
            self.losses.append(number)
            self.stirred.add(lane)
        elif self.durations[number]:
            self.lane_free_at[lane] = max(now, self.lane_free_at[lane]) + self.durations[number]
            self._end(number, self.lane_free_at[lane])
        else:
            self._finish(number, now)
