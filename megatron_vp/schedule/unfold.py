"""Turns an interlaced schedule into passes that a runtime has: what a V stands for, one after the other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod


def unfold(schedule: Schedule) -> Schedule:
    """An interlaced schedule with S and T for each V, and the embedding's passes behind the Vs; others unchanged.

    The result is a vocab-1 schedule, whose T waits for the S of all ranks and whose last stage's B for every T: the
    synchronous work of V. A microbatch is embedded two Vs ahead of its first forward, so that the rows are there in
    time, and its embedding gradient is added behind the next V.
    """
    if schedule.vocab is not VocabMethod.INTERLACED:
        return schedule
    behind, last = _embedding_passes(schedule)
    output = (PassKind.S, PassKind.T) if schedule.has_backward else (PassKind.S,)
    ranks = []
    for order in schedule.ranks:
        unfolded = list(behind[None])
        for step in order:
            if step.kind is PassKind.V:
                unfolded += [Pass(kind, step.microbatch) for kind in output] + behind[step.microbatch]
            else:
                unfolded.append(step)
        ranks.append((*unfolded, *last))
    return replace(schedule, vocab=VocabMethod.VOCAB_1, ranks=tuple(ranks))


def _embedding_passes(schedule: Schedule) -> tuple[dict[int | None, list[Pass]], list[Pass]]:
    """IF and IB behind the V of each microbatch (None: before the first V), the same on all ranks; IB left for the end.

    The first rank decides, which has the first stage.
    """
    placement = schedule.placement
    behind: dict[int | None, list[Pass]] = defaultdict(list)
    added: list[Pass] = []
    passed: list[int | None] = [None, None]
    for step in schedule.ranks[placement.first_rank]:
        if step.kind is PassKind.V:
            passed.append(step.microbatch)
            behind[step.microbatch] += added
            added = []
        elif placement.stage_of[placement.first_rank][step.chunk] == 0:
            if step.kind is PassKind.F:
                behind[passed[-2]].append(Pass(PassKind.IF, step.microbatch))
            elif step.kind is PassKind.B:
                added.append(Pass(PassKind.IB, step.microbatch))
    return behind, added
