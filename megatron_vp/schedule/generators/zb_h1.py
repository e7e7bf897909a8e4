"""ZB-H1: 1F1B with split backwards, whose weight gradients fill bubbles in the cool-down."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def zb_h1(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Rank r holds at most p - r microbatches, as in 1F1B, and r more whose W is still pending.

    Five microbatches on four ranks; F, B and W take one unit of time each:

        rank 0  F0F1F2F3......B0W0F4B1W1B2W2B3W3B4W4
        rank 1  ..F0F1F2F3..B0W0B1W1F4B2W2B3W3B4W4..
        rank 2  ....F0F1F2B0F3B1W0B2W1F4B3W2B4W3W4..
        rank 3  ......F0B0F1B1F2B2F3B3W0F4B4W1W2W3W4

    1. Fill: up to p forwards, until the first B can run.
    2. Steady: one F and one B per microbatch; rank r defers the W of r microbatches.
    3. Drain: each B runs as soon as it can, and Ws fill the gaps.
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
