"""Interleaved 1F1B with the backward split: groups of microbatches go through a rank's chunks in turn (PipeOffload)."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.placement import Placement


def _grouped(step: int, group: int, pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """A rank's next chunk begins `step` microbatches later; `group` of them follow each other in one chunk.

    All passes of all chunks take one of three slots of a microbatch: F, B, and W right behind it.
    """
    p, v = pipeline_size, chunks
    # Where groups have one microbatch, some consecutive chunks would meet in a slot and are set apart by one more.
    part = v // gcd(v, step // group)
    late = [3 * (step * chunk + group * (chunk // part)) for chunk in range(v)]
    # Ranks are two slots apart as far as there is room before the next chunk, so that no chunk's backward on the last
    # rank comes before that of the chunk behind it on rank 0.
    room = min([p - 1] + [after - before - p for before, after in pairwise(late)])
    shift = [min(rank, room) for rank in range(p)]
    forward = [late[chunk] + rank + shift[rank] for chunk in range(v) for rank in range(p)]
    backward = [
        late[-1] + late[v - 1 - chunk] + 3 * p - 2 - 2 * rank + shift[rank] for chunk in range(v) for rank in range(p)
    ]
    interval = costs.F + costs.B + costs.W
    slot = interval / (3 * v)
    return BuildingBlock(
        placement=Placement.round_robin(p, v),
        interval=interval,
        forward_time=slot,
        backward_time=slot,
        forward=tuple(place * slot for place in forward),
        backward=tuple(place * slot for place in backward),
        weight=tuple((place + 1) * slot for place in backward),
        group=group,
    )


def gis(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Groups of p: rank r holds at most p v - r chunks, and the backward split leaves no bubble more."""
    return _grouped(pipeline_size, pipeline_size, pipeline_size, chunks, costs)


def gis_h(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """Groups of p/2, rounded up: half of the memory of `gis`."""
    half = (pipeline_size + 1) // 2
    return _grouped(half, half, pipeline_size, chunks, costs)


def po(pipeline_size: int, chunks: int, costs: PassCosts) -> BuildingBlock:
    """The steps of `gis_h`, each microbatch after the other: every chunk's lifespan repeats evenly."""
    return _grouped((pipeline_size + 1) // 2, 1, pipeline_size, chunks, costs)
