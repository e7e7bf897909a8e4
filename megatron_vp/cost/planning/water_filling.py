"""Distributes work in small units so that the busiest rank has as little work as possible."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence

_HALVINGS = 64
"""Number of bisection steps, enough to narrow the interval to the precision of a float."""


def fill(
    work: Sequence[float], cost: Sequence[float], most: Sequence[int], slowness: Sequence[float] | None = None
) -> tuple[int, ...] | None:
    """Distribute units so that the largest `work[r] + slowness[r] * cost[units[r]]` is as small as possible. Return the
    number of units per rank, or None if not all units fit.

    Args:
        work: work of every rank before it gets any units.
        cost: cost of 0, 1, 2, ... units, which starts at 0 and never falls. The last entry is for all units.
        most: the most units that each rank can hold.
        slowness: relative time that each rank takes for the same units; by default, all ranks are equally fast.

    First, each rank gets as many units as it can hold without exceeding a common load, which is found by bisection.
    Each remaining unit goes to the rank whose load with that unit is lowest, or to the first of several such ranks.
    """
    total, slowness = len(cost) - 1, slowness or [1.0] * len(work)
    most = [min(cap, total) for cap in most]
    if sum(most) < total:
        return None

    def below(level: float) -> list[int]:
        return [
            min(cap, max(0, bisect_right(cost, (level - own) / slow) - 1))
            for own, cap, slow in zip(work, most, slowness, strict=True)
        ]

    low, high = min(work) - 1.0, max(work) + max(slowness) * cost[-1]
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        low, high = (level, high) if sum(below(level)) <= total else (low, level)
    units = below(low)

    def after_one_more(rank: int) -> tuple[float, int]:
        return work[rank] + slowness[rank] * cost[units[rank] + 1], rank

    queue = [after_one_more(rank) for rank, cap in enumerate(most) if units[rank] < cap]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, rank = heapq.heappop(queue)
        units[rank] += 1
        if units[rank] < most[rank]:
            heapq.heappush(queue, after_one_more(rank))
    return tuple(units)
