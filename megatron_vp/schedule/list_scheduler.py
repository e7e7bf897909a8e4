"""A list scheduler: every rank, whenever it is free, takes the first pass of its order that can run without harm.

Harmless is a pass that is ready, fits into memory, and is the first one left or ends before the first one left must
start. Passes that take memory (F, S) keep their order among themselves; so, as the given order is within the caps, the
earliest pass that is left can always run, whatever the costs.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_vp.schedule.dependencies import Graph, Step
from megatron_vp.schedule.passes import PassKind


@dataclass(frozen=True)
class Caps:
    """Most chunk activations by rank, and most microbatches between S and T on any rank."""

    activations: tuple[int, ...]
    scores: int = 2


class _Rank:
    """What a rank has left; passes are named by their place in its given order."""

    def __init__(self, order: Sequence[int], kinds: Sequence[PassKind], room: dict[PassKind, int]) -> None:
        self.order, self.kinds, self.room = order, kinds, room
        self.queues = {kind: deque(k for k, found in enumerate(kinds) if found is kind) for kind in room}
        release = PassKind.W if PassKind.W in kinds else PassKind.B
        self.frees = {release: PassKind.F, PassKind.T: PassKind.S}
        self.left = [True] * len(order)
        self.first_left = 0
        self.ready: list[int] = []
        self.result: list[int] = []
        self.free_at = 0.0

    def take(self, now: float, took: Sequence[float], latest: Sequence[float]) -> int | None:
        """Number of the pass to run now, or None where no ready pass fits."""
        due = latest[self.order[self.first_left]] + 1e-9 if self.ready else 0.0
        for place in self.ready:
            if place != self.first_left and now + took[self.order[place]] > due:
                continue
            kind = self.kinds[place]
            if kind not in self.room or (self.queues[kind][0] == place and self.room[kind]):
                self._account(place, kind)
                return self.order[place]
        return None

    def _account(self, place: int, kind: PassKind) -> None:
        if kind in self.room:
            self.queues[kind].popleft()
            self.room[kind] -= 1
        elif kind in self.frees:
            self.room[self.frees[kind]] += 1
        self.ready.remove(place)
        self.result.append(self.order[place])
        self.left[place] = False
        while self.first_left < len(self.left) and not self.left[self.first_left]:
            self.first_left += 1


class ListScheduler:
    """Plays a graph from its start. `orders[r]` are the numbers of rank r's passes in the order that is preferred,
    `took` and `latest` the duration and latest start of every node.

    The loss function takes no time, but waits for the end of a pass of the last rank.
    """

    def __init__(
        self,
        graph: Graph,
        orders: Sequence[Sequence[int]],
        took: Sequence[float],
        latest: Sequence[float],
        caps: Caps,
    ) -> None:
        self.graph, self.took, self.latest = graph, took, latest
        self.ranks = [
            _Rank(order, [graph.nodes[n].action.kind for n in order], {PassKind.F: most, PassKind.S: caps.scores})
            for order, most in zip(orders, caps.activations, strict=True)
        ]
        self.seat = {number: (rank, place) for rank, order in enumerate(orders) for place, number in enumerate(order)}
        self.waits = [len(before) for before in graph.predecessors]
        self.losses: deque[int] = deque()
        self.events: list[tuple[float, int]] = []
        self.stirred: set[int] = set()

    def run(self) -> list[list[int]]:
        """The numbers of each rank's passes in the order found."""
        for number in [number for number, count in enumerate(self.waits) if not count]:
            self._arrive(number, 0.0)
        self._start_passes(0.0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                number = heappop(self.events)[1]
                if number in self.seat:
                    self.stirred.add(self.seat[number][0])
                self._finish(number, now)
            self._start_passes(now)
        assert all(len(rank.result) == len(rank.order) for rank in self.ranks), "the given order exceeds the caps"
        return [rank.result for rank in self.ranks]

    def _start_passes(self, now: float) -> None:
        while self.stirred:
            index = self.stirred.pop()
            rank = self.ranks[index]
            if rank.free_at > now:
                continue
            while self.losses and index == len(self.ranks) - 1:
                self._finish(self.losses.popleft(), now)
            number = rank.take(now, self.took, self.latest)
            if number is not None:
                rank.free_at = now + self.took[number]
                heappush(self.events, (rank.free_at, number))

    def _finish(self, number: int, now: float) -> None:
        for successor in self.graph.successors[number]:
            self.waits[successor] -= 1
            if not self.waits[successor]:
                self._arrive(successor, now)

    def _arrive(self, number: int, now: float) -> None:
        """All that `number` waits for has ended."""
        if number in self.seat:
            rank, place = self.seat[number]
            insort(self.ranks[rank].ready, place)
            self.stirred.add(rank)
        elif isinstance(self.graph.nodes[number], Step):
            self.losses.append(number)
            self.stirred.add(len(self.ranks) - 1)
        elif self.took[number]:
            heappush(self.events, (now + self.took[number], number))
        else:
            self._finish(number, now)
