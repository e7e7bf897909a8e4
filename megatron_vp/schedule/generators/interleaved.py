"""Interleaved 1F1B, with chunks placed round-robin. Each rank runs p microbatches through a chunk, then turns to its
next chunk.
"""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def interleaved(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Rank r holds at most 2(p - 1 - r) + (v - 1)p + 1 chunk activations, as in Megatron.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2F3f0f1f2f3F4..........b0--..b1--..f4b2--..b3--..B0--B1--b4--B2--B3--....B4--
        rank 1  ..F0F1F2F3f0f1f2f3F4....b0--..b1--..b2--..f4b3--..B0--B1--b4--B2--B3--....B4--....
        rank 2  ....F0F1F2F3f0f1f2..b0--f3b1--F4b2--..b3--..f4B0--B1--b4--B2--B3--....B4--........
        rank 3  ......F0F1F2F3f0b0--f1b1--f2b2--f3b3--F4B0--B1--f4b4--B2--B3--....B4--............

    1. Fill: rank r runs 2(p - 1 - r) + (v - 1)p forwards, taking p microbatches through one chunk before the next.
    2. Steady: one forward of a chunk, then one backward of a chunk.
    3. Drain: the remaining backwards.
    """
    p, v = pipeline_size, chunks
    stages, interval = p * v, costs.F + costs.B + costs.W
    # A step has one forward and one backward of a chunk, so microbatches advance one stage per step in both directions.
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
