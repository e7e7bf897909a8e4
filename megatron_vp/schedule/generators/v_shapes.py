"""Schedules with chunks in a V shape: ZB-V, V-Half, V-Min, and V-Flex for memory limits between their peaks.

A rank takes some slots on a microbatch's way down the V, and some on the way up. More slots give more slack, and need
more memory.

The forwards of one microbatch in V-Flex, with p = 4 and slack 2. F5 is the forward of virtual stage 5, and a column is
a slot:

rank 0: F0 .  .  .  .  .  .  .  F7    Rank r has chunk 0 = stage r and chunk 1 = stage 2p - 1 - r.
rank 1: .  F1 .  .  .  .  .  F6 .     Slack gives ranks 2 and 3 two slots each on the way down.
rank 2: .  .  F2 .  .  .  F5 .  .     F4 runs in rank 3's second slot.
rank 3: .  .  .  .  F3 F4 .  .  .
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, count
from typing import NamedTuple

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def zb_v(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """V shape with 1F1B's peak activations and almost no bubble.

    Every rank holds the activations of at most p microbatches.

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
    return _packed(pipeline_size, costs, down=3, up=3)


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
    return _packed(pipeline_size, costs, down=2, up=1, gap=0 if pipeline_size % 2 else 3, turn=2)


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
    return _packed(pipeline_size, costs, down=1, up=1, gap=0 if pipeline_size % 3 else 2)


def _packed(p: int, costs: PassCosts, down: int, up: int, gap: int = 0, turn: int = 1) -> BuildingBlock:
    """Build a block in which a rank's passes share no slot: each W takes the first free slot on its rank after its B.

    `down` and `up` are the slots that every rank takes on the way down the V and back up. The last rank takes `turn`
    slots between its two backwards.
    """
    placement = Placement.v_shape(p)
    forward = _through_the_v(0, [down] * p, [up] * p)
    backward = _through_the_v(forward[-1] + 1 + gap, [down] * p, [up] * p, turn)[::-1]
    weight = [0] * placement.stages
    for stages in placement.stage_of:
        taken = {slot % 6 for stage in stages for slot in (forward[stage], backward[stage])}
        for stage in stages[::-1]:
            weight[stage] = next(slot for slot in count(backward[stage] + 1) if slot % 6 not in taken)
            taken.add(weight[stage] % 6)
    return BuildingBlock.in_slots(placement, costs, 6, forward, backward, weight)


class Shape(NamedTuple):
    """The parameters of a V-Flex block, printed in the form `slack=12,gap=2`."""

    slack: int
    """Amount of slack, from 0 to 2p. Without slack, every rank takes one slot on the way down the V and one on the way
    up, as in V-Min. Each of the first p units of slack makes one more rank take two slots on the way down, the last
    rank first. A slack of p gives V-Half. Each further unit makes one more rank take three slots each way, again the
    last rank first. A slack of 2p gives ZB-V.
    """
    gap: int
    """number of empty slots between a microbatch's last forward and its first backward"""

    def __str__(self) -> str:
        return f"slack={self.slack},gap={self.gap}"

    @classmethod
    def parse(cls, text: str) -> Shape | None:
        """Parse the output of `str`; None for any other text."""
        match = re.fullmatch(r"slack=(\d{1,6}),gap=(\d{1,2})", text)
        return cls(int(match[1]), int(match[2])) if match else None


def v_flex(shape: Shape, pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Build the block of a shape.

    The nominal times place each W right after its B. The times of two passes may overlap, because they determine only
    the initial order of the passes. `reorder_for_costs` may run a W later, as in the example below.

    In the example, each of the four ranks holds the activations of at most 3.5 of the five microbatches. F, B and W
    take one unit of time each. Lowercase letters are chunk 1:

        rank 0  F0F1F2F3F4....f0b0f1b1w0w1..f2b2B0w2f3b3W0B1w3f4b4B2W1B3w4W2W3B4W4..
        rank 1  ..F0F1F2F3F4f0..f1b0w0b1w1f2..B0b2f3W0w2B1b3f4W1B2b4B3w3W2w4B4W3W4..
        rank 2  ....F0F1F2f0F3f1F4..b0w0f2b1B0w1f3b2W0B1w2f4b3B2W1B3b4w3W2B4w4W3W4..
        rank 3  ......F0f0F1f1F2f2F3..b0B0w0f3b1W0F4B1w1f4b2B2b3B3W1w2b4B4W2w3W3w4W4

    1. Fill: forwards of chunk 0 go down the V, and forwards of chunk 1 (`f`) come back up. With slack, the last
       ranks take more than one slot (see `Shape`).
    2. Steady: for each microbatch, one F, B and W per chunk.
    3. Drain: Bs run first, and Ws fill the gaps.
    """
    p = pipeline_size
    down, up = zip(*(_slots(p, rank, shape.slack) for rank in range(p)), strict=True)
    forward = _through_the_v(0, down, up)
    backward = _through_the_v(forward[-1] + 1 + shape.gap, down, up)[::-1]
    return BuildingBlock.in_slots(Placement.v_shape(p), costs, 6, forward, backward, [place + 1 for place in backward])


def _slots(ranks: int, rank: int, slack: int) -> tuple[int, int]:
    """The numbers of slots that a rank takes on the way down the V and on the way back up."""
    more = max(0, slack - ranks)
    if rank >= ranks - more:
        return 3, 3
    return (2 if rank >= ranks - slack else 1), 1


def _through_the_v(start: int, down: Sequence[int], up: Sequence[int], turn: int = 1) -> list[int]:
    """A microbatch's slot on each rank, down and then up the V; the first slot, which is on rank 0, is `start`."""
    return list(accumulate([start, *down[:-1], turn, *up[:0:-1]]))
