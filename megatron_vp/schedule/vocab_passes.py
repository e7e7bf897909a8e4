"""Inserts the vocabulary passes into any base schedule.

Every rank with vocabulary rows gets a slot for one S, T, IF and IB per microbatch, right behind its forwards of chunk
0. For each barrier of the method, the last stage waits one more interval between a microbatch's F and its B. Each
vocabulary pass then takes the first of its rank's slots that its dependencies allow. Slots are narrow, because nominal
times only order the passes; `reorder_for_costs` applies the real costs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

TimedPass = tuple[float, Pass]
"""A nominal start time, and the pass that starts then."""


@dataclass(frozen=True)
class Nominal:
    """A schedule in nominal order, which is valid.

    `pairs` has, by rank, the forwards and backwards that stay next to each other. `spans` has the start and end of each
    pass of each rank on the block's grid.
    """

    schedule: Schedule
    pairs: tuple[tuple[tuple[Pass, Pass], ...], ...]
    spans: tuple[tuple[tuple[float, float], ...], ...]


def nominal_schedule(
    name: str, block: BuildingBlock, microbatches: int, vocab: VocabMethod, vocab_ranks: Collection[int]
) -> Nominal:
    """Put every rank's passes into nominal order; each barrier keeps one more microbatch in flight.

    `vocab_ranks` are the ranks that hold vocabulary rows.
    """
    delay = vocab.barriers * block.step
    slots = _VocabSlots(block, delay, width=0.01 * block.forward_time)
    ranks: list[list[TimedPass]] = []
    for rank, stages in enumerate(block.placement.stage_of):
        timed = slots.passes(rank) if rank in vocab_ranks else []
        for chunk, stage in enumerate(stages):
            timed.append((block.forward[stage], Pass(PassKind.F, 0, chunk)))
            timed.append((block.backward[stage] + delay, Pass(PassKind.B, 0, chunk)))
            if block.weight is not None:
                timed.append((block.weight[stage] + delay, Pass(PassKind.W, 0, chunk)))
        ranks.append(_repeat(timed, block, microbatches))
    pairs: tuple[tuple[tuple[Pass, Pass], ...], ...] = ()
    if block.overlaps is not None:
        pairs = tuple(tuple(block.overlaps(rank, microbatches, vocab.barriers)) for rank in range(len(ranks)))
        ranks = list(map(_with_whole_backwards, ranks, pairs))
    took = dict.fromkeys(vocab.passes, 4 * slots.width)
    took |= {PassKind.F: block.forward_time} | dict.fromkeys((PassKind.B, PassKind.W, PassKind.BW), block.backward_time)
    orders = tuple(tuple(step for _, step in timed) for timed in ranks)
    spans = tuple(tuple((start, start + took[step.kind]) for start, step in timed) for timed in ranks)
    return Nominal(Schedule(name, vocab, block.placement, microbatches, orders), pairs, spans)


def _with_whole_backwards(order: list[TimedPass], pairs: Sequence[tuple[Pass, Pass]]) -> list[TimedPass]:
    """Put the whole backward of every pair right behind its forward."""
    behind = dict(pairs)
    gone = {backward._replace(kind=kind) for backward in behind.values() for kind in (PassKind.B, PassKind.W)}
    found: list[TimedPass] = []
    for start, step in order:
        if step in behind:
            found += [(start, step), (start, behind[step])]
        elif step not in gone:
            found.append((start, step))
    return found


@dataclass(frozen=True, slots=True)
class _VocabSlots:
    """A rank's slot is the end of its forward of chunk 0; each of S, T, IF and IB takes `width` of it, in turn.

    S comes within one step after the last stage's forward, and T within the next step, wherever a rank's slot is in the
    step. So one step per barrier is enough, and at most two microbatches are between S and T.
    """

    block: BuildingBlock
    delay: float
    width: float

    def passes(self, rank: int) -> list[TimedPass]:
        block, width = self.block, self.width
        end = block.forward_time - 4 * width
        opens, output = (block.forward[stage] + end for stage in (block.placement.stage_of[rank][0], -1))
        # The loss function runs on rank p-1 between two passes: at the latest, when that rank has run its own S.
        loss = output + block.step + width
        backward = block.backward[0] + self.delay + block.backward_time
        return [
            (self.first(opens + 2 * width, -block.step - width), Pass(PassKind.IF, 0)),
            (self.first(opens, output), Pass(PassKind.S, 0)),
            (self.first(opens + width, loss), Pass(PassKind.T, 0)),
            # Nothing waits for IB. Two steps later, it is out of the way of the last backwards.
            (self.first(opens + 3 * width, backward + 2 * block.step), Pass(PassKind.IB, 0)),
        ]

    def first(self, opens: float, after: float) -> float:
        """First time not before `after` that is a whole number of steps from `opens`."""
        return opens + math.ceil((after - opens) / self.block.step - 1e-6) * self.block.step


def _repeat(timed: list[TimedPass], block: BuildingBlock, microbatches: int) -> list[TimedPass]:
    repeated: list[TimedPass] = []
    for microbatch in range(microbatches):
        arrival = block.arrival(microbatch)
        repeated += [(start + arrival, Pass(first.kind, microbatch, first.chunk)) for start, first in timed]
    return sorted(repeated, key=lambda item: item[0])
