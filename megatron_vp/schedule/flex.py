"""Fits a flexible family of schedules to a memory limit.

Finds the building block that gives the shortest schedule within the limit. The search tries a fixed list of
blocks in a fixed order, so all ranks of a run find the same block.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from megatron_vp.errors import UserError
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.generators.v_shapes import Shape, v_flex
from megatron_vp.schedule.graph import Graph, gc_paused
from megatron_vp.schedule.ledger import peaks
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.reorder import Search, linked_graph
from megatron_vp.schedule.request import ScheduleRequest
from megatron_vp.schedule.timeline import simulate

GAPS = range(4)
"""The values of `Shape.gap` to try."""
LEVELS = 3
"""Number of memory peaks to try: the highest ones within the limit. The search tries several, because a higher peak
does not always give a shorter schedule.
"""
SAMPLE = 800
"""Approximate value of ranks x microbatches in the schedules that are used to compare blocks with the same memory peak.
These schedules have at least 5/4 as many microbatches as ranks, but never more microbatches than the request.
"""
SMALL = 1_000
"""Up to this value of ranks x microbatches, `fitted` generates the whole schedules of the three best blocks of each
memory peak. Above this value, it generates only that of the best block.
"""


@gc_paused()
def fitted(request: ScheduleRequest, limit: float) -> Family:
    """Fit a flexible family to a memory limit, and return the fitted family.

    For the request's sizes, method and costs, the fitted family's schedule stays within the limit, and no base family
    has a shorter schedule within the limit.

    `limit` applies to activations on the device, in units of one microbatch's activations on a rank. Raises UserError
    if the family is not flexible, or if every schedule needs more memory than the limit.
    """
    family = request.family
    if not family.bases:
        raise UserError(
            f"--activation-limit cannot be used with schedule {family.name}, whose memory is fixed; use v-flex"
        )
    most = math.floor(limit * request.chunks + 1e-9)
    search = _Search(request, most)
    bases = [base.name for base in family.bases]
    is_small = request.pipeline_size * request.microbatches <= SMALL
    # Blocks are compared on a sample of the microbatches, so check the peak again with all microbatches.
    shapes = [*bases, *search.best_by_level(3 if is_small else 1)]
    found = [each for each in map(search.whole, shapes) if each.peak <= most]
    if not found:
        least = min(search.whole(shape).peak for shape in (*(str(Shape(0, gap)) for gap in GAPS), *bases))
        raise UserError(
            f"--activation-limit {limit:g} is too small for a {family.name} schedule of {request.pipeline_size} ranks, "
            f"{request.microbatches} microbatches and vocab method {request.method}; give at least "
            f"{least / request.chunks:g}"
        )
    shortest = min(each.makespan for each in found) * (1 + 1e-9)
    return next(each.family for each in found if each.makespan <= shortest)


def microbatches_of_limit(text: str, unit: str = "microbatches") -> float:
    """Parse the value of --activation-limit. Raises UserError unless it is a positive number."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0 or math.isinf(limit):
        raise UserError(f"--activation-limit {text!r} is not a positive number of {unit}; give one such as 5 or 4.5")
    return limit


def shaped(family: Family, shape: str, most: int | None = None) -> Family:
    """Return the flexible `family` with the building block `shape`: the name of one of `family.bases`, or the text of a
    `Shape`.

    `most` limits the chunk activations on every rank; None allows as many as the shape needs. Raises UserError if
    `shape` is invalid.
    """
    base = next((each for each in family.bases if each.name == shape), None)
    if base is not None:
        return replace(base, name=family.name, shape=shape, bases=family.bases, planned=family.planned)
    block = Shape.parse(shape)
    if block is None:
        names = ", ".join(each.name for each in family.bases)
        raise UserError(
            f"{shape!r} is not a shape of {family.name}; use one of {names}, or two numbers in the form "
            "slack=NUMBER,gap=NUMBER"
        )
    return replace(family, shape=shape, block=partial(v_flex, block), limit=sys.maxsize if most is None else most)


class _Generated(NamedTuple):
    """What the search keeps of a schedule that it has generated."""

    family: Family
    peak: int
    makespan: float


class _Search:
    """Generates schedules of a flexible family, and compares its building blocks on a sample of the microbatches."""

    def __init__(self, request: ScheduleRequest, most: int) -> None:
        self.request, self.most = request, most
        ranks = request.pipeline_size
        self.sample = replace(request, microbatches=min(request.microbatches, max(SAMPLE // ranks, 5 * ranks // 4)))
        self.placed = lru_cache(maxsize=None)(self._placed)
        self.graphs: dict[tuple[tuple[int, int], ...], Graph] = {}

    def whole(self, shape: str) -> _Generated:
        request = self._shaped(self.request, shape)
        schedule = request.schedule()
        peak = max(peaks(schedule, Held.ACTIVATIONS))
        return _Generated(request.family, peak, simulate(schedule, request.costs).makespan)

    def peak(self, shape: Shape) -> int:
        """Largest number of chunk activations on a rank in the sample, if passes run in the building block's order."""
        return max(peaks(self.placed(str(shape)), Held.ACTIVATIONS))

    def _placed(self, shape: str) -> Schedule:
        return self._shaped(self.sample, shape).placed().schedule

    def _shaped(self, request: ScheduleRequest, shape: str) -> ScheduleRequest:
        return replace(request, family=shaped(self.request.family, shape, self.most))

    def makespan(self, shape: Shape) -> float:
        """Makespan of the sample in the best of the orders `Search.first`."""
        schedule, request = self.placed(str(shape)), self._shaped(self.sample, str(shape))
        if schedule.offloaded not in self.graphs:
            self.graphs[schedule.offloaded] = linked_graph(schedule)
        found = Search(schedule, request.limits(schedule), request.costs, self.graphs[schedule.offloaded])
        return min(makespan for makespan, _ in found.first)

    def best_by_level(self, count: int) -> list[str]:
        """For each of the `LEVELS` highest peaks, highest first, the `count` shapes with the shortest makespans.

        For each gap, only the shapes with the `LEVELS` highest peaks within the limit are compared.
        """
        by_level: dict[int, list[Shape]] = defaultdict(list)
        for gap in GAPS:
            shapes = [Shape(slack, gap) for slack in range(2 * self.sample.pipeline_size + 1)]
            fitting = bisect_right(shapes, self.most, key=self.peak)
            levels: set[int] = set()
            for shape in reversed(shapes[:fitting]):
                levels.add(self.peak(shape))
                if len(levels) > LEVELS:
                    break
                by_level[self.peak(shape)].append(shape)
        found: list[str] = []
        for level in sorted((level for level in by_level if level <= self.most), reverse=True)[:LEVELS]:
            best = sorted(by_level[level], key=lambda shape: (self.makespan(shape), shape))
            found += map(str, best[:count])
        return found
