"""ZB-H1: 1F1B with the backward split, its weight gradients put off into the cool-down."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def zb_h1(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds at most p microbatches, as 1F1B's first does.

    1F1B's block, in which rank r holds p - r microbatches; the r more that it may hold are those whose W is pending.
    """
    p, backward = pipeline_size, costs.B + costs.W
    starts = [p * costs.F + (p - 1 - stage) * backward for stage in range(p)]
    return BuildingBlock(
        placement=Placement.linear(p),
        interval=costs.F + backward,
        forward_time=costs.F,
        backward_time=costs.B,
        forward=tuple(stage * costs.F for stage in range(p)),
        backward=tuple(starts),
        weight=tuple(start + costs.B for start in starts),
    )
