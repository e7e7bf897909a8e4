"""Extrapolates the time of a job with very many microbatches from a simulation just long enough for a steady state."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from megatron_vp.cost.layers.shapes import Job
from megatron_vp.schedule import PassKind, StageCosts, Timeline

SAMPLED, SAMPLED_PER_RANK = 512, 6
"""A simulation of p ranks has SAMPLED / p or SAMPLED_PER_RANK * p microbatches, whichever is larger. With these values,
extrapolated times are accurate to 0.3 percent, or to 4 percent for `v-min`, whose order depends on the number of
microbatches.
"""

MANY, SAMPLED_OF_MANY = 12, 3
"""With more than MANY ranks, SAMPLED_OF_MANY replaces SAMPLED_PER_RANK, to save time. Extrapolated times are then
accurate to about 0.5 percent.
"""

STEADY = (0.4, 0.75)
"""Start and end of the interval in which steady-state time is measured, as fractions of the makespan."""


def sampled(job: Job, many: int = MANY) -> Job:
    """Return the job with just enough microbatches for a steady state; `extended` adds the time of the omitted ones."""
    per_rank = SAMPLED_PER_RANK if job.pipeline <= many else SAMPLED_OF_MANY
    return replace(job, microbatches=min(job.microbatches, max(per_rank * job.pipeline, SAMPLED // job.pipeline)))


def extended(timeline: Timeline, microbatches: int) -> float:
    """Extrapolate the makespan to more `microbatches` than were simulated.

    Each additional microbatch adds the busiest rank's steady-state time per microbatch. This time is averaged over
    rounds of p microbatches, because `interleaved` works in such rounds.
    """
    simulated = timeline.schedule.microbatches
    if microbatches == simulated:
        return timeline.makespan
    # The steady state's time does not include weight gradients that are delayed until the cool-down; `added_busy` does.
    each = max(_steady_seconds(timeline), *added_busy(timeline))
    return timeline.makespan + (microbatches - simulated) * each


def added_busy(timeline: Timeline) -> list[float]:
    """Seconds for which each rank computes per additional microbatch. In the steady state, all passes of a schedule
    with pairs run in pairs, but not while the pipeline fills and drains.
    """
    schedule, costs, added = timeline.schedule, timeline.costs, list[float]()
    for rank, busy in enumerate(timeline.busy):
        always = 0.0
        if schedule.pairs and isinstance(costs, StageCosts) and costs.hidden:
            busy += sum(costs.saved(schedule, rank, *pair) for pair in schedule.pairs[rank])
            always = sum(sum(costs.hidden[stage]) for stage in schedule.placement.stage_of[rank])
        added.append(busy / schedule.microbatches - always)
    return added


def _steady_seconds(timeline: Timeline) -> float:
    """Steady-state seconds per microbatch on the busiest rank: mean time between a chunk's forwards (or backwards)."""
    schedule, busiest = timeline.schedule, timeline.busy.index(max(timeline.busy))
    ends: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for step, (_, end) in zip(schedule.ranks[busiest], timeline.spans[busiest], strict=True):
        if step.kind in (PassKind.F, PassKind.B, PassKind.BW):
            ends[step.kind is PassKind.F, step.chunk].append(end)
    opens, closes = (share * timeline.makespan for share in STEADY)
    found = []
    for each in ends.values():
        first, last = bisect_left(each, opens), bisect_right(each, closes) - 1
        rounds = max(1, (last - first) // schedule.pipeline_size)
        count = min(rounds * schedule.pipeline_size, len(each) - 1)
        first = min(first, len(each) - 1 - count)
        found.append((each[first + count] - each[first]) / count)
    return fmean(found)
