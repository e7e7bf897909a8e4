"""A list scheduler: every rank, whenever it is free, runs the first pass of its given order that is ready and fits.

It works in either direction of time: from the first pass on, or from the last pass back, where a pass is ready once
all that waits for it is placed. Passes that nothing waits for (W, IB, T of vocab-2) fill gaps and make room in memory.

A pass fits out of its turn if what is left of the given order can still follow it, in that order, within the caps. The
given order is within the caps, so some rank can always go on, whatever the costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_vp.schedule.graph import Graph
from megatron_vp.schedule.passes import PassKind


@dataclass(frozen=True)
class Caps:
    """Most chunk activations by rank, and most microbatches between S and T on any rank."""

    activations: tuple[int, ...]
    scores: int = 2


def list_schedule(
    graph: Graph, orders: Sequence[Sequence[int]], took: Sequence[float], caps: Caps, backwards: bool
) -> tuple[float, list[list[int]]]:
    """Makespan and the numbers of each rank's passes in the order found, which keeps the caps if the given `orders` do.

    `orders[r]` are the numbers of rank r's passes, `took` the duration of every node; `backwards` begins at the end.
    """
    if backwards:
        makespan, found = _ListScheduler(graph, orders, took, caps, graph.successors, graph.predecessors).run()
        return makespan, [order[::-1] for order in found]
    reverse = [order[::-1] for order in orders]
    return _ListScheduler(graph, reverse, took, caps, graph.predecessors, graph.successors).run()


class _Store:
    """One kind of memory of a rank; `held` says what it holds during each pass that is left, the next one last."""

    def __init__(self, kinds: Sequence[PassKind], taker: PassKind, giver: PassKind, cap: int) -> None:
        self.taker, self.cap = taker, cap
        self.change = {taker: 1, giver: -1}
        self.held = []
        level = 0
        for kind in reversed(kinds):
            self.held.append(level + (kind is taker))
            level += self.change.get(kind, 0)
        self.held.reverse()

    def fits(self, place: int) -> bool:
        """Whether a taker may go ahead of all that were to run before it."""
        return max(self.held[place + 1 :], default=0) < self.cap

    def remove(self, place: int, kind: PassKind) -> None:
        """Run a pass ahead of all that were to run before it."""
        if kind in self.change and place + 1 < len(self.held):
            change = self.change[kind]
            self.held[place + 1 :] = [level + change for level in self.held[place + 1 :]]
        del self.held[place]


Ready = list[int]
"""A heap of the places of ready passes, negated: the first in order comes first."""


class _Rank:
    """What a rank has left. Passes are known by their place in `order`, which names the pass to run first last."""

    def __init__(self, order: Sequence[int], kinds: Sequence[PassKind], stores: Sequence[_Store]) -> None:
        self.order, self.kinds, self.stores = order, kinds, stores
        self.left = list(range(len(order)))
        # Of the ready passes that take from one store, the first in order fits or none does.
        self.takers: list[tuple[_Store, Ready]] = [(store, []) for store in stores]
        self.others: Ready = []
        self.fillers: Ready = []
        self.result: list[int] = []
        self.free_at = 0.0

    def take(self) -> int | None:
        """Number of the pass to run now, or None where no ready pass fits."""
        best, chosen = (self.others[0], self.others) if self.others else (1, self.fillers)
        for store, ready in self.takers:
            if ready and ready[0] < best:
                if self.left[-1] == -ready[0] or store.fits(bisect_left(self.left, -ready[0])):
                    best, chosen = ready[0], ready
                elif self.fillers and self.fillers[0] < ready[0]:
                    # What waits for room goes first in the order: the fillers ahead of it make that room.
                    best, chosen = self.fillers[0], self.fillers
        return self._run(-heappop(chosen)) if chosen else None

    def _run(self, place: int) -> int:
        index = len(self.left) - 1 if self.left[-1] == place else bisect_left(self.left, place)
        for store in self.stores:
            store.remove(index, self.kinds[place])
        del self.left[index]
        self.result.append(self.order[place])
        return self.order[place]


class _ListScheduler:
    """Plays a graph whose node n waits for `before[n]` and is waited for by `after[n]`; time runs along them.

    The loss function takes no time, but waits for the end of a pass of the last rank.
    """

    def __init__(
        self,
        graph: Graph,
        orders: Sequence[Sequence[int]],
        took: Sequence[float],
        caps: Caps,
        before: Sequence[Sequence[int]],
        after: Sequence[Sequence[int]],
    ) -> None:
        self.lanes, self.took, self.after = graph.lanes, took, after
        self.ranks = []
        # Where a pass goes when it is ready, and what stands for it there.
        self.ready: list[Ready | None] = [None] * len(took)
        self.entry = [0] * len(took)
        for order, most in zip(orders, caps.activations, strict=True):
            kinds = [graph.kinds[number] for number in order]
            release = PassKind.W if PassKind.W in kinds else PassKind.B
            kept = [(PassKind.F, release, most), (PassKind.S, PassKind.T, caps.scores)]
            if after is graph.predecessors:
                kept = [(giver, taker, cap) for taker, giver, cap in kept]
            # Without a backward there is neither B nor T, and nothing is kept.
            stores = [_Store(kinds, *entry) for entry in kept if entry[0] in kinds and entry[1] in kinds]
            rank = _Rank(order, kinds, stores)
            self.ranks.append(rank)
            takers = {store.taker: ready for store, ready in rank.takers}
            for place, (number, kind) in enumerate(zip(order, kinds, strict=True)):
                self.ready[number] = takers[kind] if kind in takers else rank.others if after[number] else rank.fillers
                self.entry[number] = -place
        self.waits = list(map(len, before))
        self.losses: deque[int] = deque()
        # What ends when: a heap of times, for many passes end at the same time.
        self.times: list[float] = []
        self.ending: dict[float, list[int]] = {}
        self.lane_free_at = [0.0] * (1 + max(graph.lanes))
        # Ranks that something has changed for. Small integers leave a set in the same order every time.
        self.stirred: set[int] = set()
        # The same durations summed in another order are the same moment.
        self.tolerance = 1e-7 * max(took, default=0.0)

    def run(self) -> tuple[float, list[list[int]]]:
        """When all is done, and the numbers of each rank's passes in the order found."""
        for number in [number for number, count in enumerate(self.waits) if not count]:
            self._arrive(number, 0.0)
        self._start_passes(0.0)
        while self.times:
            now = self.times[0]
            while self.times and self.times[0] <= now + self.tolerance:
                for number in sorted(self.ending.pop(heappop(self.times))):
                    if self.ready[number] is not None:
                        self.stirred.add(self.lanes[number])
                    self._finish(number, now)
            self._start_passes(now)
        assert not any(rank.left for rank in self.ranks), "the given order exceeds the caps"
        return max(rank.free_at for rank in self.ranks), [rank.result for rank in self.ranks]

    def _start_passes(self, now: float) -> None:
        latest = now + self.tolerance
        while self.stirred:
            index = self.stirred.pop()
            rank = self.ranks[index]
            if rank.free_at > latest:
                continue
            while self.losses and index == len(self.ranks) - 1:
                self._finish(self.losses.popleft(), now)
            number = rank.take()
            if number is not None:
                rank.free_at = now + self.took[number]
                self._end(number, rank.free_at)

    def _end(self, number: int, time: float) -> None:
        """Note that `number` ends at `time`."""
        if time in self.ending:
            self.ending[time].append(number)
        else:
            self.ending[time] = [number]
            heappush(self.times, time)

    def _finish(self, number: int, now: float) -> None:
        for waiting in self.after[number]:
            self.waits[waiting] -= 1
            if not self.waits[waiting]:
                self._arrive(waiting, now)

    def _arrive(self, number: int, now: float) -> None:
        """All that `number` waits for is done."""
        ready = self.ready[number]
        if ready is not None:
            heappush(ready, self.entry[number])
            self.stirred.add(self.lanes[number])
        elif self.lanes[number] < len(self.ranks):
            self.losses.append(number)
            self.stirred.add(self.lanes[number])
        elif self.took[number]:
            lane = self.lanes[number]
            self.lane_free_at[lane] = max(now, self.lane_free_at[lane]) + self.took[number]
            self._end(number, self.lane_free_at[lane])
        else:
            self._finish(number, now)
