"""V-Min: chunks in a V shape, with no spare time between a microbatch's passes on successive ranks. Peak activations
are about a third of 1F1B's.
"""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock, v_shaped_block
from megatron_vp.schedule.costs import PassCosts


def v_min(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds the activations of at most ceil((p + 2)/3) microbatches.

    Forwards and backwards advance one rank every slot, down the V and back up. If p is a multiple of three, two empty
    slots between a microbatch's forwards and backwards ensure that a rank's passes share no slot. The ranks have no
    slack, so slow communication and passes of unequal duration leave bubbles in the steady state.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1..........f0b0w0F2....f1b1B0w1W0F3f2b2B1w2W1F4f3b3B2w3W2..f4b4B3w4W3......B4W4
        rank 1  ..F0........f0F1..b0w0..f1F2B0b1w1W0f2F3B1b2w2W1f3F4B2b3w3W2f4..B3b4w4W3....B4W4..
        rank 2  ....F0....f0....F1..b0f1w0B0F2W0b1f2w1B1F3W1b2f3w2B2F4W2b3f4w3B3W3..b4w4..B4W4....
        rank 3  ......F0f0........F1f1b0B0w0W0F2f2b1B1w1W1F3f3b2B2w2W2F4f4b3B3w3W3....b4B4w4W4....

    1. Fill: forwards go down the V and straight back up, one after another.
    2. Steady: for each microbatch, one F, B and W per chunk, with no slack between ranks.
    3. Drain: Bs run first, and Ws fill the gaps.
    """
    p, gap = pipeline_size, 0 if pipeline_size % 3 else 2
    forward = list(range(2 * p))
    backward = [4 * p + gap - 1 - stage for stage in range(2 * p)]
    return v_shaped_block(p, costs.F + costs.B + costs.W, forward, backward)
