"""Keeps the frontier of time and memory during a search, and decides whether further runs may improve the frontier."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_vp.cost.prediction.bounds import ROUNDING, Bound

SLOWEST = 1.5
"""The frontier leaves out runs whose time is above this multiple of the fastest run's time."""


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
            kept: list[tuple[float, float]] = []
            for point in sorted([*self.points, (seconds, memory)]):
                if not kept or point[1] < kept[-1][1]:
                    kept.append(point)
            self.points = kept

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
