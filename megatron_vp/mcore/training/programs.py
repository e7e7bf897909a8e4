"""Makes the schedule and the programs of an iteration, and caches them for later iterations."""

from __future__ import annotations

from functools import lru_cache

from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule
from megatron_vp.schedule.request import ScheduleRequest


@lru_cache(maxsize=8)
def programs(request: ScheduleRequest, mtp_stage: int | None) -> tuple[Schedule, tuple[Program, ...]]:
    """Return the schedule of an iteration and the programs of all pipeline ranks.

    The costs in the request decide the order of passes and the points at which the programs communicate.
    `mtp_stage` is explained in `lower`.
    """
    schedule = expand_interlaced(request.schedule())
    return schedule, lower(schedule, request.costs, mtp_stage)


def late_weights(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """Return the (chunk, microbatch) pairs for which the rank runs another F or B between B and W."""
    started: dict[tuple[int, int], int] = {}
    late, passes = set(), 0
    for step in schedule.ranks[rank]:
        which = (step.chunk, step.microbatch)
        if step.kind in (PassKind.F, PassKind.B, PassKind.BW):
            passes += 1
        if step.kind is PassKind.B:
            started[which] = passes
        if step.kind is PassKind.W and passes > started[which]:
            late.add(which)
    return frozenset(late)
