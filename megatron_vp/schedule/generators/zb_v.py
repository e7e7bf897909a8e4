"""ZB-V: chunks in a V shape, with spare time between a microbatch's passes on successive ranks, both down the V and
back up. It has 1F1B's peak activations and almost no bubble.
"""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock, v_shaped_block
from megatron_vp.schedule.costs import PassCosts


def zb_v(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds the activations of at most p microbatches.

    A slot holds one F, B or W. In the building block, a microbatch advances one rank every three slots, down the V and
    back up, in forwards as in backwards. The exception is the step between the two chunks of the last rank, which takes
    one slot. The two slots between successive ranks are slack, in which messages are sent and ranks run other passes.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2F3F4....f0b0f1b1f2b2w0f3b3B0w1w2f4b4B1w3B2W0B3w4B4W1W2W3W4..
        rank 1  ..F0F1F2F3F4f0..f1b0f2b1w0f3b2B0b3w1f4w2B1b4B2W0B3w3B4W1w4W2W3W4..
        rank 2  ....F0F1F2f0F3f1F4f2b0w0f3b1B0b2w1f4b3B1W0B2b4B3w2B4W1w3W2w4W3W4..
        rank 3  ......F0f0F1f1F2f2F3f3b0B0w0F4W0f4b1B1b2B2b3B3b4B4w1W1w2W2w3W3w4W4

    1. Fill: forwards of chunk 0 go down the V, and those of chunk 1 (`f`) come back up.
    2. Steady: for each microbatch, one F, B and W per chunk.
    3. Drain: Bs run first, and Ws fill the gaps.
    """
    p, stages = pipeline_size, range(2 * pipeline_size)
    forward = [3 * stage - 2 * (stage >= p) for stage in stages]
    backward = [12 * p - 7 - 3 * stage - 2 * (stage < p) for stage in stages]
    return v_shaped_block(p, costs.F + costs.B + costs.W, forward, backward)
