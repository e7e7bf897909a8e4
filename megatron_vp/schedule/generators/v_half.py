"""V-Half: chunks in V shape, slack on the way down only, so half of 1F1B's activations, alike on all ranks."""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock, v_shaped_block
from megatron_vp.schedule.costs import PassCosts


def v_half(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds at most p/2 + 1 microbatches, (p + 1)/2 for odd p.

    Down the V every second slot, up every slot, forwards and backwards alike. For even p, three slots between forwards
    and backwards keep a rank's passes out of each other's slots.
    """
    p, gap = pipeline_size, 0 if pipeline_size % 2 else 3
    down, up = range(p), range(p - 1, -1, -1)
    forward = [2 * rank for rank in down] + [3 * p - rank - 2 for rank in up]
    backward = [6 * p + gap - rank - 2 for rank in down] + [3 * p + gap + 2 * rank - 1 for rank in up]
    return v_shaped_block(p, costs.F + costs.B + costs.W, forward, backward)
