"""V-Half: chunks in a V shape. Passes go up the V twice as fast as they go down. Peak activations are about half of
1F1B's.
"""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock, v_shaped_block
from megatron_vp.schedule.costs import PassCosts


def v_half(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds the activations of at most p/2 + 1 microbatches. If p is odd, the limit is (p + 1)/2.

    Forwards and backwards both go down the V at one rank per two slots, and back up at one rank per slot. If p is even,
    three empty slots between a microbatch's forwards and backwards ensure that a rank's passes share no slot.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2F3F4....f0b0w0f1b1w1..f2B0b2w2W0..f3B1b3w3W1f4b4B2w4B3W2W3..B4W4
        rank 1  ..F0F1F2F3..f0..f1b0w0..b1f2B0w1F4b2W0f3B1w2W1b3f4w3B2b4B3W2w4W3B4W4..
        rank 2  ....F0F1F2f0F3f1....b0w0f2B0b1w1W0f3F4B1b2w2W1f4b3B2w3B3b4W2w4B4W3W4..
        rank 3  ......F0f0F1f1F2f2....b0B0w0F3W0f3b1B1w1F4W1f4b2B2b3B3w2W2b4B4w3W3w4W4

    1. Fill: only forwards run, down the V and back up.
    2. Steady: for each microbatch, one F, B and W per chunk.
    3. Drain: Bs run first, and Ws fill the gaps.
    """
    p, gap = pipeline_size, 0 if pipeline_size % 2 else 3
    down, up = range(p), range(p - 1, -1, -1)
    forward = [2 * rank for rank in down] + [3 * p - rank - 2 for rank in up]
    backward = [6 * p + gap - rank - 2 for rank in down] + [3 * p + gap + 2 * rank - 1 for rank in up]
    return v_shaped_block(p, costs.F + costs.B + costs.W, forward, backward)
