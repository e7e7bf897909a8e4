"""Adds passes O and R to a nominal schedule. They copy activations to host memory and back (PipeOffload).

Ideally, activations are copied out right after their forward and copied back just before their backward. In practice,
copies are delayed because a rank has a single copy lane, on which copy-outs and copy-backs take turns (Wan et al.,
arXiv 2503.01328, section 4.2). Copies are placed according to the passes' nominal times. In a building block, forwards
come no faster in the warm-up than in the steady state, so copies keep up with them from the start.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean

from megatron_vp.errors import UserError
from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.dependencies import OFFLOAD_KINDS
from megatron_vp.schedule.graph import Link
from megatron_vp.schedule.ledger import lives
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Pass, PassKind, Schedule
from megatron_vp.schedule.transfers import Copy
from megatron_vp.schedule.vocab_passes import Nominal

LEAST_OFFLOADED = 2**20
"""Size in bytes of the smallest offloaded tensor; a smaller copy would take longer to launch than to run."""

Span = tuple[float, float]
"""Start and end."""
Key = tuple[int, int]
"""Chunk and microbatch."""


def offload(nominal: Nominal, chunks: int, costs: Costs) -> Nominal:
    """On each rank, add passes O and R for the `chunks` chunks whose activations live longest.

    `costs` give the duration of copies, in the unit of `nominal.spans`. A chunk is not offloaded if the copy-back of
    one of its microbatches would have to start before the copy-out has ended.
    """
    if not chunks:
        return nominal
    schedule = nominal.schedule
    orders = []
    for rank, order in enumerate(schedule.ranks):
        pair_starts = {first for first, _ in nominal.pairs[rank]}
        placing = _Placing(order, nominal.spans[rank], pair_starts, nominal.interval)
        moved = placing.longest_lived(chunks)
        while moved:
            durations = {
                chunk: [costs.communication(schedule, Copy(to_host, 0, chunk, rank)) for to_host in (True, False)]
                for chunk in moved
            }
            places = placing.places(durations)
            late = {chunk for (chunk, _), (leaves, returns) in places.items() if leaves >= returns}
            if not late:
                order = placing.with_passes(places)
                break
            moved.remove(min(late, key=placing.lifespans.__getitem__))
        orders.append(order)
    return replace(nominal, schedule=replace(schedule, ranks=tuple(orders)))


def check_offloaded(schedule: Schedule) -> None:
    """Raise UserError if `schedule` was generated to offload activations, but offloads none."""
    if not schedule.offloaded:
        raise UserError(
            f"--offload-chunks moves no activations with {schedule.name} on {schedule.pipeline_size} ranks: each chunk "
            "has a backward that starts before its activations could go to the host and come back; use more pipeline "
            "ranks or another schedule, or leave --offload-chunks out"
        )


def computed_between(placed: Schedule, found: Schedule, returning: Collection[tuple[int, Pass]]) -> list[Link]:
    """Dependencies that keep at least one computing pass between each R in `returning` and the O before it.

    `placed` is the nominal order, and `found` is the order that `reorder_for_costs` derived from it. In `placed`,
    computing passes lie between each O and its R. Of these passes, the one nearest to R in `found` must run after O and
    before R.
    """
    links: list[Link] = []
    for rank, back in returning:
        order, place = placed.ranks[rank], {step: k for k, step in enumerate(found.ranks[rank])}
        left = back._replace(kind=PassKind.O)
        between = [step for step in order[order.index(left) : order.index(back)] if step.kind not in OFFLOAD_KINDS]
        nearest = min(between, key=lambda step: abs(place[step] - place[back]))
        links += pairwise((rank, each) for each in (left, nearest, back))
    return links


class _Placing:
    """Chooses the places of copies in one rank's order of passes. A copy at place k runs right before the k-th pass."""

    def __init__(self, order: Sequence[Pass], spans: Sequence[Span], pair_starts: set[Pass], interval: float) -> None:
        self.order, self.spans, self.interval = tuple(order), spans, interval
        self.starts = [start for start, _ in spans]
        self.latest_ends = list(accumulate((end for _, end in spans), max))
        self.within_pairs = {place + 1 for place, step in enumerate(order) if step in pair_starts}
        self.forward: dict[Key, int] = {}
        self.backward: dict[Key, int] = {}
        for place, step in enumerate(order):
            if step.kind in (PassKind.F, PassKind.B, PassKind.BW):
                places = self.forward if step.kind is PassKind.F else self.backward
                places[step.chunk, step.microbatch] = place
        held: dict[int, list[float]] = defaultdict(list)
        for first, last in lives(order, Held.ACTIVATIONS):
            held[order[first].chunk].append(spans[last][1] - spans[first][0])
        self.lifespans = {chunk: fmean(each) for chunk, each in held.items()}
        """For each chunk, the mean time for which the device holds a microbatch's activations."""
        # Times that should be equal can differ by rounding errors.
        self.tolerance = 1e-9 * (self.latest_ends[-1] - self.starts[0])

    def longest_lived(self, count: int) -> list[int]:
        """The `count` chunks whose activations the device holds longest, longest first."""
        return sorted(self.lifespans, key=lambda chunk: (-self.lifespans[chunk], chunk))[:count]

    def places(self, durations: dict[int, list[float]]) -> dict[Key, tuple[int, int]]:
        """Places of O and R for every microbatch of the chunks in `durations`.

        `durations[chunk]` holds the durations of one copy-out and one copy-back. The copy lane's time is divided into
        slots, each for one copy-out and one copy-back. Each copy-out takes the first free slot after its forward. Each
        copy-back takes the last free slot before its backward; the last backward chooses first. If a microbatch's
        copies take longer than `interval`, the copy times assumed here are scaled down to fit; in a real run, passes
        then wait for the copies.
        """
        keys = [key for key in self.forward if key[0] in durations]
        lane = len(durations) * sum(max(each[way] for each in durations.values()) for way in (0, 1))
        if lane > self.interval:
            faster = self.interval / lane
            durations = {chunk: [faster * each for each in both] for chunk, both in durations.items()}
        slot_out, slot_in = (max(each[way] for each in durations.values()) for way in (0, 1))
        period = slot_out + slot_in
        ends = {key: self.spans[self.forward[key]][1] for key in keys}
        begins = {key: self.starts[self.backward[key]] for key in keys}
        first = min(ends.values())

        leaves, slot = {}, -1
        for key in sorted(keys, key=ends.__getitem__):
            begin = ends[key]
            if period:
                slot = max(slot + 1, math.ceil((begin - first - self.tolerance) / period))
                begin = first + slot * period
            left = bisect_left(self.starts, begin + durations[key[0]][0] - self.tolerance)
            leaves[key] = self._outside_pairs(max(left, self.forward[key] + 1), 1)
        returns, before = {}, math.inf
        for key in sorted(keys, key=begins.__getitem__, reverse=True):
            begin = begins[key]
            if period:
                before = min(before - 1, math.floor((begin - first + self.tolerance) / period) - 1)
                begin = first + before * period + slot_out
            back = bisect_right(self.latest_ends, begin + self.tolerance)
            returns[key] = self._outside_pairs(min(back, self.backward[key]), -1)
        return {key: (leaves[key], returns[key]) for key in keys}

    def _outside_pairs(self, place: int, away: int) -> int:
        return place + away if place in self.within_pairs else place

    def with_passes(self, places: dict[Key, tuple[int, int]]) -> tuple[Pass, ...]:
        """The rank's order with passes O and R inserted at `places`; at the same place, O comes before R."""
        found = [(place, 2, 0, step) for place, step in enumerate(self.order)]
        for (chunk, microbatch), both in places.items():
            forward = self.forward[chunk, microbatch]
            for which, kind in enumerate((PassKind.O, PassKind.R)):
                found.append((both[which], which, forward, Pass(kind, microbatch, chunk)))
        return tuple(step for *_, step in sorted(found))
