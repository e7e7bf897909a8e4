"""DualPipeV: chunks in V shape; a forward and a whole backward of different microbatches run side by side.

Time is cut into slots of one forward and one whole backward. Everything moves one stage per slot, down the V and up
again, so that on every rank the forward of one chunk and the backward of the other share a slot (p = 4, rank 1):

    slot      1    3    5    6    7    8    9    10    11    12   ...  14
    rank 1    F0.0 F1.0 F2.0 F0.1 F3.0 F1.1 F4.0 F2.1  F5.0  F3.1 ...  F4.1
                                            B0.1       B1.1       ...  B0.0

Source: DeepSeek-AI's DualPipe and its V-shaped form, https://github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.placement import Placement


def dual_pipe_v(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds at most p + 1/2 microbatches.

    While the pipeline fills and drains, forwards and backwards run alone. Backwards are then split, and their W fills
    bubbles.
    """
    p, slot = pipeline_size, (costs.F + costs.B + costs.W) / 2
    stages, behind_forward = range(2 * p), costs.F / 2
    backward = [(4 * p - 1 - stage) * slot + behind_forward for stage in stages]

    def overlaps(rank: int, microbatches: int, barriers: int) -> list[tuple[Pass, Pass]]:
        """Forward and backward of the slots in which neither would have to wait for the other.

        A barrier delays backwards by two slots, one microbatch. The first 2p - 1 - r forwards of chunk 0 (and one more
        for each barrier) fill the pipeline.
        """
        apart, pairs = p + barriers, []
        for microbatch in range(apart, microbatches):
            if microbatch >= 2 * p - 1 - rank + barriers:
                pairs.append((Pass(PassKind.F, microbatch, 0), Pass(PassKind.BW, microbatch - apart, 1)))
            pairs.append((Pass(PassKind.F, microbatch, 1), Pass(PassKind.BW, microbatch - apart, 0)))
        return pairs

    return BuildingBlock(
        placement=Placement.v_shape(p),
        interval=2 * slot,
        forward_time=slot,
        backward_time=slot - behind_forward,
        forward=tuple(stage * slot for stage in stages),
        backward=tuple(backward),
        weight=tuple(start + 0.5 * (slot - behind_forward) for start in backward),
        overlaps=overlaps,
    )
