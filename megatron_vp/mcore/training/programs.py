"""The schedule and the programs of an iteration, made once for each number of microbatches."""

from __future__ import annotations

from functools import lru_cache

from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.families import family
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule, VocabMethod
from megatron_vp.schedule.reorder import evaluation


@lru_cache(maxsize=8)
def programs(
    name: str,
    pipeline_size: int,
    chunks: int,
    microbatches: int,
    method: VocabMethod,
    costs: PassCosts,
    forward_only: bool,
    embeds_on_last_stage: bool,
) -> tuple[Schedule, tuple[Program, ...]]:
    """The schedule of an iteration and the programs of all pipeline ranks.

    Args:
        name: of the schedule's family.
        pipeline_size, chunks, microbatches: p, v, m.
        method: of the vocabulary layers, where the family does not have its own.
        costs: order the passes, and place communication between them.
        forward_only: an evaluation, which runs the forward passes in an order of its own.
        embeds_on_last_stage: see `lower`.
    """
    schedule = _schedule(name, pipeline_size, chunks, microbatches, method, costs)
    if forward_only:
        schedule = evaluation(schedule, costs)
    return schedule, lower(schedule, costs, embeds_on_last_stage)


@lru_cache(maxsize=8)
def _schedule(
    name: str, pipeline_size: int, chunks: int, microbatches: int, method: VocabMethod, costs: PassCosts
) -> Schedule:
    chosen = family(name)
    return expand_interlaced(chosen.schedule(pipeline_size, microbatches, chosen.method(method), chunks, costs))


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
