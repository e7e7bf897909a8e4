"""Makes the schedule and the programs of an iteration, and caches them for later iterations."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_vp.mcore.model.trained_layers import Trained
from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule, VocabMethod
from megatron_vp.schedule.request import ScheduleRequest


@lru_cache(maxsize=8)
def programs(request: ScheduleRequest, mtp_stage: int | None) -> tuple[Schedule, tuple[Program, ...]]:
    """Return the schedule of an iteration and the programs of all pipeline ranks.

    The costs in the request decide the order of passes and the points at which the programs communicate.
    `mtp_stage` is explained in `lower`.
    """
    schedule = expand_interlaced(request.schedule())
    return schedule, lower(schedule, request.costs, mtp_stage)


def without_frozen(costs: Costs | None, method: VocabMethod, trained: Trained) -> Costs | None:
    """Leave the gradients of frozen weights out of the costs that decide the order of passes.

    The time of W is scaled by the fraction of weights that are trained. IB takes no time if the embedding is frozen. If
    the output layer is frozen, the time of T is halved with vocab-1, where T still computes dX, and set to zero with
    any other vocabulary method.
    """
    if trained.everything:
        return costs
    costs = costs or PassCosts()
    kept_t = 0.5 if method is VocabMethod.VOCAB_1 else 0.0
    t, ib = 1.0 if trained.output else kept_t, 1.0 if trained.embedding else 0.0
    if isinstance(costs, PassCosts):
        mean = sum(trained.weights) / len(trained.weights)
        return replace(costs, W=round(mean * costs.W, 2), T=t * costs.T, IB=ib * costs.IB)
    weights = tuple(round(part * each, 2) for part, each in zip(trained.weights, costs.W, strict=True))
    return replace(costs, W=weights, T=tuple(t * each for each in costs.T), IB=tuple(ib * each for each in costs.IB))


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
