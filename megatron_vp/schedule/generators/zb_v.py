"""ZB-V: chunks in V shape, every pass three slots behind the one before it; 1F1B's activations, hardly a bubble."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock, v_shaped_block
from megatron_vp.schedule.costs import PassCosts


def zb_v(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds at most p microbatches.

    Down and up the V every third slot, forwards and backwards alike, except that a rank's own hand-over from one chunk
    to the other takes one slot. The slack of two slots a stage fills the warm-up and hides communication.
    """
    p, stages = pipeline_size, range(2 * pipeline_size)
    forward = [3 * stage - 2 * (stage >= p) for stage in stages]
    backward = [12 * p - 7 - 3 * stage - 2 * (stage < p) for stage in stages]
    return v_shaped_block(p, costs.F + costs.B + costs.W, forward, backward)
