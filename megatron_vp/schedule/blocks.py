"""A building block: when the passes of one microbatch run on all ranks, and how often the block repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.placement import Placement

Overlaps = Callable[[int, int, int], Sequence[tuple[Pass, Pass]]]
"""(rank, microbatches, barriers) -> forward and backward of each pair."""


@dataclass(frozen=True)
class BuildingBlock:
    """Nominal start times of microbatch 0 by virtual stage.

    Microbatches come in groups of `group`. Groups follow each other as fast as their work allows, `group` intervals
    apart; those of a larger group `interval` / chunks, as the group goes through one chunk after the other.
    `weight` is None if B includes the weight gradient. `overlaps` names pairs of a forward and a backward of
    different microbatches that stay next to each other; the backward of a pair is whole, the others are split. Times
    need only respect the dependencies: they say which pass goes first, not when it runs. `forward_time` and
    `backward_time` are the durations of F and B (with W where it is included) that they allow for.
    """

    placement: Placement
    interval: float
    forward_time: float
    backward_time: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    group: int = 1
    overlaps: Overlaps | None = None

    @property
    def step(self) -> float:
        """Time between two microbatches of a group."""
        return self.interval if self.group == 1 else self.interval / self.placement.chunks

    def arrival(self, microbatch: int) -> float:
        """How much later `microbatch` runs than microbatch 0."""
        groups, place = divmod(microbatch, self.group)
        return groups * self.group * self.interval + place * self.step


def weights_in_free_slots(
    placement: Placement, slots: int, forward: Sequence[int], backward: Sequence[int]
) -> list[int]:
    """Slot of each stage's W, where all passes take one of the `slots` of an interval: the first free one after B."""
    weight = [0] * placement.stages
    for stages in placement.stage_of:
        taken = {slot % slots for stage in stages for slot in (forward[stage], backward[stage])}
        for stage in sorted(stages, key=lambda stage: backward[stage]):
            weight[stage] = next(slot for slot in count(backward[stage] + 1) if slot % slots not in taken)
            taken.add(weight[stage] % slots)
    return weight


def v_shaped_block(
    pipeline_size: int, interval: float, forward: Sequence[int], backward: Sequence[int]
) -> BuildingBlock:
    """Two chunks per rank in V shape, B and W split, all passes on a grid of six slots per interval.

    `forward` and `backward` are slots by virtual stage; no two passes of a rank may share a slot modulo six.
    """
    placement = Placement.v_shape(pipeline_size)
    weight = weights_in_free_slots(placement, 6, forward, backward)
    slot = interval / 6
    first, second, third = (tuple(place * slot for place in places) for places in (forward, backward, weight))
    return BuildingBlock(placement, interval, slot, slot, first, second, third)
