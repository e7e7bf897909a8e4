"""1F1B: a microbatch runs down the ranks and straight back up; one forward and one backward alternate on every rank."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def one_f_one_b(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Rank r holds at most p - r microbatches."""
    backward = costs.B + costs.W
    return BuildingBlock(
        placement=Placement.linear(pipeline_size),
        interval=costs.F + backward,
        forward_time=costs.F,
        backward_time=backward,
        forward=tuple(stage * costs.F for stage in range(pipeline_size)),
        backward=tuple(pipeline_size * costs.F + (pipeline_size - 1 - s) * backward for s in range(pipeline_size)),
        weight=None,
    )
