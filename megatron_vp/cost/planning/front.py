"""Keeps the frontier of time and memory of a search's runs, and decides whether more runs may improve the frontier."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_vp.cost.prediction.bounds import ROUNDING, Bound

SLOWEST = 1.5
"""Runs that take more than this many times as long as the fastest run do not count as part of the frontier."""


@dataclass
class Front:
    """The simulated runs that fit `limit` and that no other run beats in both time and memory, fastest first."""

    limit: float
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, memory: float) -> None:
        """Add a simulated run."""
        if memory <= self.limit:
            kept: list[tuple[float, float]] = []
            for point in sorted([*self.points, (seconds, memory)]):
                if not kept or point[1] < kept[-1][1]:
                    kept.append(point)
            self.points = kept

    def may_gain(self, bound: Bound) -> bool:
        """Whether a run with these lower bounds may improve the front.

        A run whose time lies between those of two neighbouring points improves the front only if it needs less memory
        than the faster point. The lower bound on memory falls with time, so it is enough to check it at the slower
        point's time.
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
