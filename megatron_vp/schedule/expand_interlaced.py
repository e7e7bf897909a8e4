"""Expands interlaced schedules: replaces each vocabulary pass V, which the runtime cannot run, by S, T, IF and IB."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

EMBEDDED_AHEAD = 2
"""Number of microbatches by which embedding runs ahead of the first stage."""


def expand_interlaced(schedule: Schedule) -> Schedule:
    """Replace each V of an interlaced schedule by S and T, and add IF and IB; return other schedules unchanged.

    The result is a vocab-1 schedule: T waits for the S of all ranks, and B of the last stage waits for the T of all
    ranks. These waits synchronise all ranks as V does. The IB of each microbatch is inserted after the first V that
    follows the microbatch's B on stage 0. If no V follows, the IB comes last. On the first stage's rank, IF runs right
    after an F. Other ranks run each IF or IB right after the V that precedes it on the first stage's rank.
    """
    if schedule.vocab is not VocabMethod.INTERLACED:
        return schedule
    first, chunk = schedule.placement.first_rank, schedule.placement.chunk_of(0)
    output = (PassKind.S, PassKind.T) if schedule.has_backward else (PassKind.S,)
    forwards = [step for step in schedule.ranks[first] if step.kind is PassKind.F and step.chunk == chunk]
    embeds = iter([Pass(PassKind.IF, step.microbatch) for step in forwards])
    start = list(islice(embeds, EMBEDDED_AHEAD))
    # What other ranks insert at the start (None) and after each V; `waiting` are the IBs since the last V.
    behind: dict[Pass | None, list[Pass]] = {None: list(start)}
    latest, own = None, start
    waiting: list[Pass] = []
    for step in schedule.ranks[first]:
        if step.kind is PassKind.V:
            latest, behind[step] = step, list(waiting)
            own += [*(Pass(kind, step.microbatch) for kind in output), *waiting]
            waiting = []
            continue
        own.append(step)
        if step.kind is PassKind.F and step.chunk == chunk:
            ahead = list(islice(embeds, 1))
            own += ahead
            behind[latest] += ahead
        elif step.kind is PassKind.B and step.chunk == chunk:
            waiting.append(Pass(PassKind.IB, step.microbatch))
    ranks = []
    for rank, order in enumerate(schedule.ranks):
        expanded = own if rank == first else list(behind[None])
        for step in order if rank != first else ():
            expanded += [Pass(kind, step.microbatch) for kind in output] if step.kind is PassKind.V else [step]
            expanded += behind.get(step, ())
        ranks.append((*expanded, *waiting))
    return replace(schedule, vocab=VocabMethod.VOCAB_1, ranks=tuple(ranks))
