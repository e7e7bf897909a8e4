"""1F1B: after the fill, every rank alternates between forwards and backwards. Without chunks, with split backwards, and
with several chunks per rank.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.passes import Pass
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
    return _one_chunk(pipeline_size, costs, split=False)


def zb_h1(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """1F1B with split backwards, whose weight gradients fill bubbles in the cool-down.

    Rank r holds at most p - r microbatches, as in 1F1B, and r more whose W is still pending.

    Five microbatches on four ranks; F, B and W take one unit of time each:

        rank 0  F0F1F2F3......B0W0F4B1W1B2W2B3W3B4W4
        rank 1  ..F0F1F2F3..B0W0B1W1F4B2W2B3W3B4W4..
        rank 2  ....F0F1F2B0F3B1W0B2W1F4B3W2B4W3W4..
        rank 3  ......F0B0F1B1F2B2F3B3W0F4B4W1W2W3W4

    1. Fill: up to p forwards, until the first B can run.
    2. Steady: one F and one B per microbatch; rank r defers the W of r microbatches.
    3. Drain: each B runs as soon as it can, and Ws fill the gaps.
    """
    return _one_chunk(pipeline_size, costs, split=True)


def _one_chunk(p: int, costs: PassCosts, split: bool) -> BuildingBlock:
    whole = costs.B + costs.W
    backward = tuple(p * costs.F + (p - 1 - stage) * whole for stage in range(p))
    return BuildingBlock(
        placement=Placement.round_robin(p),
        interval=costs.F + whole,
        forward_time=costs.F,
        backward_time=costs.B if split else whole,
        forward=tuple(stage * costs.F for stage in range(p)),
        backward=backward,
        weight=tuple(start + costs.B for start in backward) if split else None,
    )


def interleaved(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Every rank takes p microbatches through a chunk, then turns to its next chunk; chunks are placed round-robin.

    Rank r holds at most 2(p - 1 - r) + (v - 1)p + 1 chunk activations, as in Megatron.

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


def overlapped_interleaved(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Interleaved 1F1B in which the forward and the backward of a step run as one, as in Megatron's combined 1F1B.

    Without a further step between them, the last stage's backward would need the forward of its own pair. The price is
    one more chunk activation.
    """
    block = replace(interleaved(pipeline_size, chunks, costs), apart=1, joint=True)
    step = block.interval / chunks

    def overlaps(rank: int, microbatches: int, barriers: int) -> list[tuple[Pass, Pass]]:
        late = (barriers + block.apart) * block.step - block.forward_time
        forward, backward = {}, {}
        for microbatch in range(microbatches):
            for chunk, stage in enumerate(block.placement.stage_of[rank]):
                start = block.arrival(microbatch)
                forward[round((start + block.forward[stage]) / step)] = Pass(PassKind.F, microbatch, chunk)
                backward[round((start + block.backward[stage] + late) / step)] = Pass(PassKind.B, microbatch, chunk)
        return [(forward[each], backward[each]) for each in sorted({*forward} & {*backward})]

    return replace(block, overlaps=overlaps)
