"""Interleaved 1F1B: several chunks a rank, round robin; a group of p microbatches goes through chunk after chunk."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def interleaved(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Rank r forwards 2(p - 1 - r) + (v - 1)p chunks before its first backward, then one for one, as in Megatron."""
    p, v = pipeline_size, chunks
    stages, interval = p * v, costs.F + costs.B + costs.W
    # A step has one forward and one backward of a chunk, so microbatches move one stage a step, down and up again.
    step = interval / v
    return BuildingBlock(
        placement=Placement.round_robin(p, v),
        interval=interval,
        forward_time=costs.F / v,
        backward_time=step - costs.F / v,
        forward=tuple(stage * step for stage in range(stages)),
        backward=tuple((2 * stages - 2 - stage) * step + costs.F / v for stage in range(stages)),
        weight=None,
        group=p,
    )
