"""The schedule and the programs of an iteration, made once for each number of microbatches."""

from __future__ import annotations

from functools import lru_cache

from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule, VocabMethod


@lru_cache(maxsize=8)
def programs(
    family: Family,
    pipeline_size: int,
    chunks: int,
    microbatches: int,
    method: VocabMethod,
    costs: Costs,
    forward_only: bool,
    embeds_on_last_stage: bool,
    vocab_ranks: tuple[int, ...] | None = None,
) -> tuple[Schedule, tuple[Program, ...]]:
    """The schedule of an iteration and the programs of all pipeline ranks.

    Args:
        family: the schedule's, or that of its file.
        pipeline_size, chunks, microbatches: p, v, m.
        method: of the vocabulary layers, where the family does not have its own.
        costs: order the passes, and place communication between them.
        forward_only: an evaluation, which runs the forward passes in an order of its own.
        embeds_on_last_stage: see `lower`.
        vocab_ranks: pipeline ranks with vocabulary rows; None: all.
    """
    make = family.evaluation if forward_only else family.schedule
    schedule = expand_interlaced(make(pipeline_size, microbatches, family.method(method), chunks, costs, vocab_ranks))
    return schedule, lower(schedule, costs, embeds_on_last_stage)


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
