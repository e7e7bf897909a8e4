"""The schedule and the programs of an iteration, made once for each number of microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_vp.runtime.collectives import LayerShards
from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule, VocabMethod
from megatron_vp.schedule.request import ScheduleRequest


@lru_cache(maxsize=8)
def programs(request: ScheduleRequest, embeds_on_last_stage: bool) -> tuple[Schedule, tuple[Program, ...]]:
    """The schedule of an iteration and the programs of all pipeline ranks; `embeds_on_last_stage`: see `lower`.

    The costs of the request order the passes, and place communication between them.
    """
    schedule = expand_interlaced(request.schedule())
    return schedule, lower(schedule, request.costs, embeds_on_last_stage)


def without_frozen(costs: Costs | None, method: VocabMethod, shards: LayerShards | None) -> Costs | None:
    """What passes are ordered for, without the gradients of frozen vocabulary layers.

    IB then takes no time, and neither does T but for vocab-1, of whose two products it keeps that of dX: half of it.
    """
    if shards is None or (shards.trains_embedding and shards.trains_output):
        return costs
    costs = costs or PassCosts()
    left = {"IB": 1.0 if shards.trains_embedding else 0.0}
    left["T"] = 1.0 if shards.trains_output else 0.5 if method is VocabMethod.VOCAB_1 else 0.0
    durations = {kind: getattr(costs, kind) for kind in left}
    return replace(
        costs,
        **{
            kind: tuple(left[kind] * each for each in took) if isinstance(took, tuple) else left[kind] * took
            for kind, took in durations.items()
        },
    )


def late_weights(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """The (chunk, microbatch) of a rank of which another F or B runs between B and W."""
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
