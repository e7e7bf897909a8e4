"""Repeats a building block for all microbatches, and inserts the vocabulary passes.

Every rank with vocabulary rows gets one slot per microbatch for S, T, IF and IB together, at the end of its forward of
chunk 0. Each barrier of the vocabulary method delays all backwards by one `BuildingBlock.step`. Each vocabulary pass
then takes the first of its rank's slots that its dependencies allow. Slots can be shorter than the passes, because the
slots' times determine only the order of passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

TimedPass = tuple[float, Pass]
"""A pass and its nominal start time."""


@dataclass(frozen=True)
class Nominal:
    """A valid schedule, in which each rank's passes are in the order of their nominal times.

    `pairs` lists each rank's (forward, backward) pairs. The two passes of a pair stay next to each other. `spans` are
    the nominal start and end times of each rank's passes. A rank starts one microbatch per `interval` on average.
    """

    schedule: Schedule
    pairs: tuple[tuple[tuple[Pass, Pass], ...], ...]
    spans: tuple[tuple[tuple[float, float], ...], ...]
    interval: float


def nominal_schedule(
    name: str, block: BuildingBlock, microbatches: int, vocab: VocabMethod, vocab_ranks: Collection[int]
) -> Nominal:
    """Sort every rank's passes by their nominal times. Each barrier of `vocab` and each step of `block.apart` delays
    all backwards by `block.step`.
    """
    delay = (vocab.barriers + block.apart) * block.step
    width = 0.01 * block.forward_time
    chunked = [(PassKind.F, block.forward, 0.0), (PassKind.B, block.backward, delay)]
    if block.weight is not None:
        chunked.append((PassKind.W, block.weight, delay))
    arrivals = [(microbatch, block.arrival(microbatch)) for microbatch in range(microbatches)]
    ranks: list[list[TimedPass]] = []
    for rank, stages in enumerate(block.placement.stage_of):
        timed = _vocabulary_passes(block, rank, delay, width) if rank in vocab_ranks else []
        for chunk, stage in enumerate(stages):
            timed += [(starts[stage] + late, Pass(kind, 0, chunk)) for kind, starts, late in chunked]
        repeated = [
            (start + arrival, Pass(first.kind, microbatch, first.chunk))
            for microbatch, arrival in arrivals
            for start, first in timed
        ]
        ranks.append(sorted(repeated, key=itemgetter(0)))
    pairs = tuple(tuple(block.overlaps(rank, microbatches, vocab.barriers)) for rank in range(len(ranks)))
    ranks = list(map(_with_whole_backwards, ranks, pairs))
    took = dict.fromkeys(vocab.passes, 4 * width)
    took |= {PassKind.F: block.forward_time} | dict.fromkeys((PassKind.B, PassKind.W, PassKind.BW), block.backward_time)
    orders = tuple(tuple(step for _, step in timed) for timed in ranks)
    spans = tuple(tuple((start, start + took[step.kind]) for start, step in timed) for timed in ranks)
    joint = pairs if block.joint else ()
    schedule = Schedule(name, vocab, block.placement, microbatches, orders, pairs=joint)
    return Nominal(schedule, pairs, spans, block.interval)


def _with_whole_backwards(order: list[TimedPass], pairs: Sequence[tuple[Pass, Pass]]) -> list[TimedPass]:
    """For each (forward, backward) pair, replace the backward's B and W by a whole backward right after the forward."""
    behind = dict(pairs)
    gone = {backward._replace(kind=kind) for backward in behind.values() for kind in (PassKind.B, PassKind.W)}
    found: list[TimedPass] = []
    for start, step in order:
        if step in behind:
            found += [(start, step), (start, behind[step])]
        elif step not in gone:
            found.append((start, step))
    return found


def _vocabulary_passes(block: BuildingBlock, rank: int, delay: float, width: float) -> list[TimedPass]:
    """Assign times to a rank's vocabulary passes. The time reserved for the rank's forward of chunk 0 ends with a slot
    for these passes: four parts of length `width`, for S, T, IF and IB. All backwards are late by `delay`.

    Wherever a rank's slot lies, its S runs within one `BuildingBlock.step` after the last stage's forward, and its T
    runs one step later. All backwards therefore need a delay of only one step per barrier. On each rank, at most two
    microbatches at a time have finished S but not T.
    """
    end = block.forward_time - 4 * width
    opens, output = (block.forward[stage] + end for stage in (block.placement.stage_of[rank][0], -1))
    # T waits for the loss function, which needs S of all shards. The last S ends no later than `loss`.
    loss = output + block.step + width
    backward = block.backward[0] + delay + block.backward_time
    parts = (
        # The kind of pass, the time at which its part of the slot opens, and the earliest time of the pass.
        (PassKind.IF, opens + 2 * width, -block.step - width),
        (PassKind.S, opens, output),
        (PassKind.T, opens + width, loss),
        # No pass waits for IB, so IB runs two steps later than it could, to avoid delaying the last backwards.
        (PassKind.IB, opens + 3 * width, backward + 2 * block.step),
    )
    # The slots of a rank are a whole number of steps apart.
    return [
        (start + math.ceil((after - start) / block.step - 1e-6) * block.step, Pass(kind, 0))
        for kind, start, after in parts
    ]
