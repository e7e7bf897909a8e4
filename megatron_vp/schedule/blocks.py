"""A building block: when the passes of one microbatch run, on all ranks, and how often the block repeats."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.schedule.placement import Placement


@dataclass(frozen=True)
class BuildingBlock:
    """Nominal start times of microbatch 0 by virtual stage; microbatch i follows i intervals later.

    `weight` is None where B includes the weight gradient. `held[r]` is the most chunk activations rank r may hold.
    Times need only respect the dependencies: they say which pass goes first, not when it runs.
    """

    placement: Placement
    interval: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    held: tuple[int, ...]
