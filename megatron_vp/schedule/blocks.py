"""Defines building blocks, which say when each rank runs a microbatch's passes and at what interval they repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.placement import Placement

Overlaps = Callable[[int, int, int], Sequence[tuple[Pass, Pass]]]
"""Maps a rank, the number of microbatches and `VocabMethod.barriers` to (forward, backward) pairs. The two passes of a
pair belong to different microbatches and run back to back.
"""


@dataclass(frozen=True)
class BuildingBlock:
    """Nominal start times of microbatch 0's F (`forward`), B (`backward`) and W (`weight`) on every virtual stage.

    The times serve only to order the passes, so it is enough that they respect the dependencies. F takes `forward_time`
    and B takes `backward_time`; `weight` is None if B includes the weight gradient.

    Microbatches are processed in groups of `group`. Each group starts `group` intervals after the previous one, because
    a microbatch occupies a rank for one interval in total. If `group` is above 1, the microbatches of a group start
    `interval` / chunks apart, because a rank takes the whole group through one chunk before the next chunk.

    The backwards of the pairs in `overlaps` are whole. If the block has `weight`, all other backwards are split.
    """

    placement: Placement
    interval: float
    forward_time: float
    backward_time: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    group: int = 1
    overlaps: Overlaps = lambda rank, microbatches, barriers: ()
    apart: int = 0
    """number of steps by which all backwards are late, so that the two passes of a pair do not need each other"""
    joint: bool = False
    """whether the two passes of a pair run as one (`Schedule.pairs`)"""

    @classmethod
    def in_slots(
        cls,
        placement: Placement,
        costs: PassCosts,
        slots: int,
        forward: Sequence[int],
        backward: Sequence[int],
        weight: Sequence[int],
        group: int = 1,
    ) -> BuildingBlock:
        """A block whose interval has `slots` slots, one for each F, B and W of a rank. `forward`, `backward` and
        `weight` give the slots of F, B and W by virtual stage.
        """
        interval = costs.F + costs.B + costs.W
        slot = interval / slots
        f, b, w = (tuple(place * slot for place in places) for places in (forward, backward, weight))
        return cls(placement, interval, slot, slot, f, b, w, group)

    @property
    def step(self) -> float:
        """Time between successive microbatches of a group."""
        return self.interval if self.group == 1 else self.interval / self.placement.chunks

    def arrival(self, microbatch: int) -> float:
        """Time from the start of microbatch 0 to the start of `microbatch`."""
        groups, place = divmod(microbatch, self.group)
        return groups * self.group * self.interval + place * self.step
