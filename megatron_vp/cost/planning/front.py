"""Finds the frontier of time and memory, and decides during a search whether further runs may improve it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_vp.cost.planning.bounds import ROUNDING, Bound

SLOWEST = 1.5
"""The frontier leaves out runs whose time is above this multiple of the fastest run's time."""


def time_and_memory(run: Any) -> tuple[float, float]:
    """The iteration time and peak memory of an evaluated run."""
    return run.iteration_seconds, run.peak_memory


def frontier[Run](runs: Iterable[Run], point: Callable[[Run], tuple[float, float]] = time_and_memory) -> list[Run]:
    """Return the runs that no other run beats in both time and memory, fastest first."""
    found: list[Run] = []
    for run in sorted(runs, key=point):
        if not found or point(run)[1] < point(found[-1])[1]:
            found.append(run)
    return found


def thinned[Item](items: list[Item], most: int) -> list[Item]:
    """Select `most` evenly spaced items, including the first and the last; all if there are not more than `most`."""
    last = len(items) - 1
    return items if last < most else [items[round(place * last / (most - 1))] for place in range(most)]


@dataclass
class Front:
    """The simulated runs whose memory is at most `limit` and that no other run beats in both time and memory, fastest
    first.
    """

    limit: float
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, memory: float) -> None:
        """Add a simulated run."""
        if memory <= self.limit:
            self.points = frontier([*self.points, (seconds, memory)], lambda point: point)

    def may_gain(self, bound: Bound) -> bool:
        """Whether a run with these lower bounds may improve the front.

        A run whose time lies between those of two neighbouring points improves the front only if it needs less memory
        than the faster point. The longer a run takes, the lower its bound on memory, so it is enough to check this
        bound at the slower point's time.
        """
        if not self.points:
            return bound.memory <= self.limit
        last = SLOWEST * self.points[0][0]
        times = [seconds for seconds, _ in self.points if seconds < last] + [last]
        most = [math.nextafter(self.limit, math.inf), *(memory for _, memory in self.points)]
        return any(
            bound.seconds <= seconds * (1 + ROUNDING) and bound.memory_within(seconds) * (1 - ROUNDING) < memory
            for seconds, memory in zip(times, most, strict=False)
        )

    def expects(self, bound: Bound) -> bool:
        """Like `may_gain`, but treats `bound.expected` as another lower bound on memory."""
        return self.may_gain(replace(bound, memory=max(bound.memory, bound.expected)))
