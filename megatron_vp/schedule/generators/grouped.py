"""Interleaved 1F1B with split backwards (PipeOffload). A group of microbatches runs through one chunk after another."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def _grouped(step: int, group: int, pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Build a block for groups of `group` microbatches; each chunk starts `step` microbatches after the previous chunk.

    Each microbatch has three slots per chunk: for F, for B, and for W right after B.
    """
    p, v = pipeline_size, chunks
    # With one microbatch per group, chunks that are `part` apart would share slots. Chunks from `part` on therefore
    # start three slots later, chunks from 2 * `part` on six slots later, and so on.
    part = v // gcd(v, step // group)
    late = [3 * (step * chunk + group * (chunk // part)) for chunk in range(v)]
    # Up to rank `room`, a forward starts two slots after the previous rank's forward. On later ranks, this delay is one
    # slot. `room` is chosen such that a chunk's forward on the last rank ends before the next chunk's forward starts on
    # rank 0. With this choice, a chunk's backward on the last rank never comes before the next chunk's backward on rank
    # 0, whose gradient it needs.
    room = min([p - 1] + [after - before - p for before, after in pairwise(late)])
    shift = [min(rank, room) for rank in range(p)]
    forward = [late[chunk] + rank + shift[rank] for chunk in range(v) for rank in range(p)]
    backward = [
        late[-1] + late[v - 1 - chunk] + 3 * p - 2 - 2 * rank + shift[rank] for chunk in range(v) for rank in range(p)
    ]
    weight = [place + 1 for place in backward]
    return BuildingBlock.in_slots(Placement.round_robin(p, v), costs, 3 * v, forward, backward, weight, group)


def gis(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Groups have p microbatches. Rank r holds at most p * v - r chunk activations, and Ws fill bubbles.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2F3f0f1f2f3......b0w0F4b1w1..b2w2..b3w3f4B0W0B1W1B2W2b4B3W3w4B4W4
        rank 1  ..F0F1F2F3f0f1f2....b0w0f3b1w1..b2F4..b3w2w3B0f4B1W0B2W1b4B3W2W3B4w4W4
        rank 2  ....F0F1F2F3f0f1..b0w0f2b1w1f3b2....b3w2F4B0w3B1f4B2W0b4B3W1W2B4W3w4W4
        rank 3  ......F0F1F2F3f0b0w0f1b1w1f2b2w2f3b3w3B0..F4B1W0B2f4b4B3W1..B4W2W3w4W4

    1. Fill: p microbatches go through chunk 0, then through chunk 1 (`f`).
    2. Steady: F, B and W take turns.
    3. Drain: each W runs right after its B or in a later gap.
    """
    return _grouped(pipeline_size, pipeline_size, pipeline_size, chunks, costs)


def gis_h(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Groups have p/2 microbatches, rounded up. For even p, rank 0 has 1/2 + 1/(2v) of the peak activations of `gis`.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2F3f0f1..........b0w0..f2b1w1f3B0W0F4B1W1b2w2..f4b3w3B2W2B3W3b4w4....B4W4
        rank 1  ..F0F1F2..f0f1......b0w0F3b1w1f2B0W0f3B1W1F4b2w2..b3w3f4B2W2B3W3b4w4....B4W4..
        rank 2  ....F0F1....f0f1..b0w0F2b1w1F3B0W0f2B1W1f3b2w2F4b3w3..B2f4B3W2b4W3w4..B4W4....
        rank 3  ......F0F1....f0b0w0f1b1w1F2B0W0F3B1W1f2b2w2f3b3w3F4B2W2B3f4b4W3w4..B4W4......

    1. Fill: groups of p/2 microbatches go through chunk 0, then through chunk 1 (`f`).
    2. Steady: F, B and W take turns.
    3. Drain: each W runs right after its B or in a later gap.
    """
    half = (pipeline_size + 1) // 2
    return _grouped(half, half, pipeline_size, chunks, costs)


def po(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Like `gis_h`, but with groups of one microbatch. In the steady phase, a chunk keeps each microbatch's activations
    for the same length of time.

    Five microbatches on four ranks; F, B and W take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2..f0f1F3f2......b0w0F4b1w1f3B0W0..b2f4w2B1W1..b3w3B2W2b4B3w4W3B4W4
        rank 1  ..F0F1F2..f0f1F3....b0w0f2b1w1F4B0W0f3b2w2..B1f4..b3W1B2w3b4B3W2w4B4W3W4
        rank 2  ....F0F1F2..f0f1..b0w0F3b1w1f2B0W0F4b2w2f3B1W1..b3f4B2..b4B3w3W2B4w4W3W4
        rank 3  ......F0F1F2..f0b0w0f1b1w1F3B0W0f2b2w2F4B1W1f3b3B2w3f4b4B3....B4W2w4W3W4

    1. Fill: the first microbatches go through chunk 0. Chunk 1 (`f`) starts at least p/2 microbatches later (3 in the
       drawing). Then the chunks take turns.
    2. Steady: F, B and W take turns.
    3. Drain: each W runs right after its B or in a later gap.
    """
    return _grouped((pipeline_size + 1) // 2, 1, pipeline_size, chunks, costs)
