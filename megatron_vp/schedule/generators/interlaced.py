"""Interlaced: one chunk a rank, and one vocabulary pass V a microbatch that all ranks run at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement


def interlaced(pipeline_size: int, microbatches: int) -> Schedule:
    """Rank r holds at most floor(1.5 p) - r microbatches.

    Between one V and the next every rank runs one forward and one backward: backward first on the last rank, then
    alternately. So within such a period a forward can follow the one of the rank before, on every other rank, but a
    backward never can: forwards advance two ranks a period, backwards one.
    """
    ranks = tuple(tuple(_order(pipeline_size - 1 - rank, microbatches)) for rank in range(pipeline_size))
    return Schedule("interlaced", VocabMethod.INTERLACED, Placement.linear(pipeline_size), microbatches, ranks)


def _order(distance: int, microbatches: int) -> Iterator[Pass]:
    """Passes of the rank `distance` ranks before the last. Period i ends with the V of microbatch i."""
    ahead, behind = distance // 2, distance + 1
    for period in range(-ahead, microbatches + behind):
        forward, backward = Pass(PassKind.F, period + ahead), Pass(PassKind.B, period - behind)
        steps = (forward, backward) if distance % 2 else (backward, forward)
        yield from (step for step in (*steps, Pass(PassKind.V, period)) if 0 <= step.microbatch < microbatches)
