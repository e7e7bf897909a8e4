"""DualPipeV: chunks in a V shape; forwards are paired with whole backwards of other microbatches.

A slot is as long as one forward and one whole backward. Every microbatch advances one stage per slot, down the V and up
again. So on every rank, the forward of one chunk and the backward of the other share a slot.

Source: DeepSeek-AI's DualPipe and its V-shaped form, https://github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.placement import Placement


def dual_pipe_v(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank holds the activations of at most p + 1/2 microbatches.

    While the pipeline fills and drains, forwards and backwards run unpaired. The unpaired backwards are split, and each
    W fills a bubble.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are passes of chunk 1:

        rank 0  F0F1F2F3F4....f0b0f1b1f2b2f3b3w0w1w2w3..f4..B0--b4B1B2B3w4W1W2B4W3W4
        rank 1  ..F0F1F2F3F4f0..f1b0f2b1f3b2w0b3w1w2w3f4B0--B1B2B3b4W1w4W2W3B4W4....
        rank 2  ....F0F1F2f0F3f1F4f2b0f3b1w0b2w1b3f4B0--B1B2w2B3W1w3b4W2w4B4W3W4....
        rank 3  ......F0f0F1f1F2f2F3f3F4b0--f4B0--b1B1b2B2b3B3w1W1w2W2b4B4w3W3w4W4..

    1. Fill: forwards of chunk 0, then of chunk 1 (`f`).
    2. Steady: each forward of a chunk is followed by a whole backward (`b0--`) of the other chunk.
    3. Drain: backwards of both chunks; the Ws of split backwards fill the gaps.
    """
    p, slot = pipeline_size, (costs.F + costs.B + costs.W) / 2
    stages, behind_forward = range(2 * p), costs.F / 2
    backward = [(4 * p - 1 - stage) * slot + behind_forward for stage in stages]

    def overlaps(rank: int, microbatches: int, barriers: int) -> list[tuple[Pass, Pass]]:
        """The rank's (forward, backward) pairs. Each barrier delays every backward by two slots, the time that a rank
        takes for one microbatch.

        The first 2p - 1 - r forwards of chunk 0, and one more for each barrier, fill the pipeline and stay unpaired.
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


def overlapped_dual_pipe_v(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """DualPipeV in which the two passes of a pair run as one."""
    return replace(dual_pipe_v(pipeline_size, chunks, costs), joint=True)
