"""Divides layers over virtual stages, and vocabulary rows over ranks, so that the busiest rank has little work.

Layers may differ in work, as in hybrid models or where only some layers have experts. Each rank may also have other
work, such as vocabulary layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron_vp.cost.layers.layer_types import layer_kinds
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.schedule import Placement

_HALVINGS = 64
"""Bisection steps in the search for a level of work, enough to narrow the interval to the precision of a float."""

_LONGEST_MOVE = 8
"""Largest number of neighbouring stage boundaries that are moved together."""

_ROUNDING = 1e-9
"""Relative differences up to this one are rounding errors."""


TILT = 1e-3
"""The largest work in `sloping`, as a fraction of the largest layer's."""

Division = tuple[tuple[int, ...], range]
"""The number of layers of every virtual stage, and the ranks that may hold vocabulary rows."""


def layer_seconds(times: PassTimes) -> list[float]:
    """Seconds that all passes of one microbatch take in each layer of the job, in order."""
    kinds = layer_kinds(times.job, times.job.model.layers)
    took = {kind: sum(times.layer(kind)) for kind in {*kinds}}
    return [took[kind] for kind in kinds]


def divided(
    work: Sequence[float],
    placement: Placement,
    extra: Sequence[float] | None = None,
    may_be_empty: Collection[int] = (),
) -> tuple[int, ...] | None:
    """Return each virtual stage's number of layers, or None if there are too few layers.

    Args:
        work: work of every layer.
        extra: other work of every rank.
        may_be_empty: virtual stages that may have no layers.

    The division minimises the busiest rank's work and, as far as that leaves a choice, the sum of the squares of all
    ranks' work. It may be only a local optimum, which does not improve if at most _LONGEST_MOVE neighbouring stage
    boundaries are moved by one layer.
    """
    return _divided(tuple(work), placement, tuple(extra or [0.0] * placement.ranks), frozenset(may_be_empty))


@lru_cache(maxsize=1024)  # Many candidates of a job have the same layers and the same other work.
def _divided(
    work: tuple[float, ...], placement: Placement, extra: tuple[float, ...], may_be_empty: frozenset[int]
) -> tuple[int, ...] | None:
    p, least = placement.ranks, [int(stage not in may_be_empty) for stage in range(placement.stages)]
    if sum(least) > len(work):
        return None
    by_rank = _Cuts(
        work, Placement.round_robin(p), extra, [sum(least[own] for own in row) for row in placement.stage_of]
    )
    ends = min(map(by_rank.improved, (by_rank.by_target(), by_rank.by_level())), key=by_rank.figures)
    if placement.chunks > 1:
        cuts = _Cuts(work, placement, extra, least)
        found = map(cuts.improved, (_shared_out(ends, placement, may_be_empty), cuts.by_target()))
        ends = min(found, key=lambda each: round(cuts.figures(each)[0] / sum(work) * p, 3))
    return tuple(end - start for start, end in pairwise(ends))


def _shared_out(ends: Sequence[int], placement: Placement, may_be_empty: Collection[int]) -> list[int]:
    """Share out each rank's layers over its stages. Which stages get one layer more varies from rank to rank."""
    layers = [0] * placement.stages
    for rank, ((start, end), stages) in enumerate(zip(pairwise(ends), placement.stage_of, strict=True)):
        turn = rank % placement.chunks
        order = sorted(stages[turn:] + stages[:turn], key=may_be_empty.__contains__)
        for place, stage in enumerate(order):
            layers[stage] = (end - start + placement.chunks - 1 - place) // placement.chunks
    return [*accumulate(layers, initial=0)]


def sloping(work: Sequence[float], ranks: int) -> list[float]:
    """Other work with which a division gives more layers to the first ranks, where this makes no rank busier."""
    return [TILT * max(work) * rank / ranks for rank in range(ranks)]


def divisions(work: Sequence[float], placement: Placement, cost: Sequence[float]) -> list[list[Division]]:
    """Groups of divisions of layers for uneven vocabulary shards; `cost` is as in `fill`.

    Five groups: the most even division, the most even one with more layers on the first or on the last ranks,
    and those that leave time for all rows on the first or on the last 1, 2, ..., p - 1 ranks.
    """
    p, units = placement.ranks, len(cost) - 1
    everyone, slope = range(p), sloping(work, p)
    first = [([cost[-(-units // count)]] * count + [0.0] * (p - count), everyone[:count]) for count in range(1, p)]
    last = [(extra[::-1], everyone[p - len(holders) :]) for extra, holders in first]
    groups = [*([(extra, everyone)] for extra in ([0.0] * p, slope, slope[::-1])), first, last]
    return [
        [(layers, holders) for extra, holders in group if (layers := divided(work, placement, extra))]
        for group in groups
    ]


def fill(work: Sequence[float], cost: Sequence[float], most: Sequence[int]) -> tuple[int, ...] | None:
    """Distribute units so that the largest `work[r] + cost[units[r]]` is as small as possible. Return the number of
    units per rank, or None if not all units fit.

    Args:
        work: work of every rank before it gets any units.
        cost: cost of 0, 1, 2, ... units, which starts at 0 and never falls. The last entry is for all units.
        most: the most units that each rank can hold.

    First, each rank gets the units that it can hold without exceeding the mean load. Each remaining unit goes to the
    rank whose load with that unit is lowest, or to the first of several such ranks.
    """
    total = len(cost) - 1
    most = [min(cap, total) for cap in most]
    if sum(most) < total:
        return None
    mean = level([own for own, cap in zip(work, most, strict=True) if cap], cost[-1])
    units = [min(cap, max(0, bisect_right(cost, mean - own) - 1)) for own, cap in zip(work, most, strict=True)]
    if sum(units) > total:
        units = [0] * len(work)

    def after_one_more(rank: int) -> float:
        return work[rank] + cost[units[rank] + 1]

    for _ in range(total - sum(units)):
        units[min((rank for rank, cap in enumerate(most) if units[rank] < cap), key=after_one_more)] += 1
    return tuple(units)


def level(loads: Sequence[float], work: float) -> float:
    """The level to which `work`, which can be divided freely, raises the least loaded ranks."""
    loads = sorted(loads)
    means = [(work + sum(loads[:count])) / count for count in range(1, len(loads) + 1)]
    return min(means)


class _Cuts:
    """Finds where to cut a sequence of layers. `ends` always lists 0, followed by the end of each stage."""

    def __init__(
        self, work: Sequence[float], placement: Placement, extra: Sequence[float], least: Sequence[int]
    ) -> None:
        self.extra, self.least = extra, least
        self.sums = [0.0, *accumulate(work)]
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.last = [len(work) - needed for needed in [*list(accumulate(least[::-1]))[-2::-1], 0]]
        """The last possible end of every stage."""

    def figures(self, ends: Sequence[int]) -> tuple[float, float]:
        """The busiest rank's work, and the sum of the squares of all ranks' work."""
        loads = self.loads(ends)
        return max(loads), sum(each * each for each in loads)

    def loads(self, ends: Sequence[int]) -> list[float]:
        """Every rank's work."""
        loads = list(self.extra)
        for rank, (start, end) in zip(self.rank_of, pairwise(ends), strict=True):
            loads[rank] += self.sums[end] - self.sums[start]
        return loads

    def by_target(self) -> list[int]:
        """Every stage ends at the last layer before the point where it would end if all ranks had equal work."""
        target, ends, reached = level(self.extra, self.sums[-1]), [0], 0.0
        for rank, least, last in zip(self.rank_of, self.least, self.last, strict=True):
            reached += max(0.0, target - self.extra[rank]) * len(self.extra) / len(self.least)
            ends.append(max(ends[-1] + least, min(self._place(reached), last)))
        return [*ends[:-1], len(self.sums) - 1]

    def by_level(self) -> list[int]:
        """Fills earlier ranks first, up to the lowest level at which all layers find a place; one stage per rank."""
        low, high = 0.0, max(self.extra) + self.sums[-1]
        found = self._below(high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            ends = self._below(middle)
            if ends[-1] == len(self.sums) - 1 and max(self.loads(ends)) <= middle * (1 + _ROUNDING):
                high, found = middle, ends
            else:
                low = middle
        return found

    def _below(self, most: float) -> list[int]:
        """Fills ranks in order, each up to the level `most`."""
        ends = [0]
        for extra, least, last in zip(self.extra, self.least, self.last, strict=True):
            ends.append(max(ends[-1] + least, min(self._place(self.sums[ends[-1]] + most - extra), last)))
        return ends

    def _place(self, reached: float) -> int:
        """The largest number of layers whose work does not exceed `reached`."""
        return bisect_right(self.sums, reached + _ROUNDING * self.sums[-1]) - 1

    def improved(self, ends: list[int]) -> list[int]:
        """Moves one or several neighbouring stage boundaries by one layer, until no such move is an improvement."""
        while (better := self._moved(ends)) is not None:
            ends = better
        return ends

    def _moved(self, ends: list[int]) -> list[int] | None:
        """The ends after the first move that helps; None if no move does."""
        loads, sums, last = self.loads(ends), self.sums, len(ends) - 1
        most, squares = self.figures(ends)
        for count in range(1, min(_LONGEST_MOVE, last - 1) + 1):
            for first in range(1, last - count + 1):
                before, after = first - 1, first + count - 1  # Only these two stages gain or lose a layer.
                for step in (-1, 1):
                    if (ends[first] + step - ends[before] < self.least[before]) or (
                        ends[after + 1] - ends[after] - step < self.least[after]
                    ):
                        continue
                    tried = [*ends[:first], *(end + step for end in ends[first : after + 1]), *ends[after + 1 :]]
                    moved = loads.copy()
                    for stage in range(before, after + 1):
                        own = sums[tried[stage + 1]] - sums[tried[stage]] - sums[ends[stage + 1]] + sums[ends[stage]]
                        moved[self.rank_of[stage]] += own
                    found = max(moved)
                    if found < (1 - _ROUNDING) * most or (
                        found <= most and sum(each * each for each in moved) < (1 - _ROUNDING) * squares
                    ):
                        return tried
        return None
