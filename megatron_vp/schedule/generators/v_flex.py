"""V-Flex: chunks in a V shape with slack on some ranks, for memory limits between V-Min's and ZB-V's peaks.

The forwards of one microbatch, with p = 4 and slack 2. F5 is the forward of virtual stage 5, and a column is a slot:

rank 0: F0 .  .  .  .  .  .  .  F7    Rank r has chunk 0 = stage r and chunk 1 = stage 2p - 1 - r.
rank 1: .  F1 .  .  .  .  .  F6 .     Slack gives ranks 2 and 3 two slots each on the way down.
rank 2: .  .  F2 .  .  .  F5 .  .     F4 runs in rank 3's second slot.
rank 3: .  .  .  .  F3 F4 .  .  .
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.family import Block
from megatron_vp.schedule.placement import Placement


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

    @property
    def block(self) -> Block:
        """The function that builds this shape's building block, for `Family.block`."""
        return partial(_v_flex, self)


def _v_flex(shape: Shape, pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
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
    interval = costs.F + costs.B + costs.W
    slot = interval / 6
    return BuildingBlock(
        placement=Placement.v_shape(p),
        interval=interval,
        forward_time=slot,
        backward_time=slot,
        forward=tuple(slot * place for place in forward),
        backward=tuple(slot * place for place in backward),
        weight=tuple(slot * (place + 1) for place in backward),
    )


def _slots(ranks: int, rank: int, slack: int) -> tuple[int, int]:
    """The numbers of slots that a rank takes on the way down the V and on the way back up."""
    more = max(0, slack - ranks)
    if rank >= ranks - more:
        return 3, 3
    return (2 if rank >= ranks - slack else 1), 1


def _through_the_v(start: int, down: tuple[int, ...], up: tuple[int, ...]) -> list[int]:
    """A microbatch's slot on each rank, down and then up the V; the first slot, which is on rank 0, is `start`."""
    places = [start]
    for slots in down[:-1]:
        places.append(places[-1] + slots)
    places.append(places[-1] + 1)
    for slots in up[:0:-1]:
        places.append(places[-1] + slots)
    return places
