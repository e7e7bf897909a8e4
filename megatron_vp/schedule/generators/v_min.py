"""V-Min: chunks in V shape, every pass right behind the one before it, so a third of 1F1B's activations."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock, v_shaped_block
from megatron_vp.schedule.costs import PassCosts


def v_min(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds at most p/3 + 2/3 microbatches, rounded up.

    Forwards and backwards go down and up the V slot by slot. For p a multiple of three, two slots between forwards and
    backwards keep a rank's passes out of each other's slots. Without slack, costs F, B and W that differ, or slow
    communication, leave bubbles in the steady state.
    """
    p, gap = pipeline_size, 0 if pipeline_size % 3 else 2
    forward = list(range(2 * p))
    backward = [4 * p + gap - 1 - stage for stage in range(2 * p)]
    return v_shaped_block(p, costs.F + costs.B + costs.W, forward, backward)
