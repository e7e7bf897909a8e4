"""1F1B: after the fill, every rank alternates between one forward and one backward."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def one_f_one_b(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Rank r holds at most p - r microbatches.

    Five microbatches on four ranks; F, B and W take one unit of time each:

        rank 0  F0F1F2F3............B0--F4B1--..B2--..B3--..B4--
        rank 1  ..F0F1F2........B0--F3B1--F4B2--..B3--..B4--....
        rank 2  ....F0F1....B0--F2B1--F3B2--F4B3--..B4--........
        rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--............

    1. Fill: rank r runs p - 1 - r forwards.
    2. Steady: one forward, then one backward, until the forwards run out.
    3. Drain: the remaining backwards.
    """
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
