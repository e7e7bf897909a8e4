"""Interlaced: one chunk per rank; all ranks run the vocabulary pass V of a microbatch at the same time.

The runtime does not run V. It runs S, T, IF and IB in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement

EMBEDDED_AHEAD = 2
"""Number of microbatches by which embedding runs ahead of the first stage."""


def interlaced(pipeline_size: int, microbatches: int) -> Schedule:
    """Rank r of p holds the activations of at most floor(1.5 p) - r microbatches.

    In the steady state, every rank runs one forward and one backward between two Vs. The last rank runs the backward
    first, the rank before it runs the forward first, and so on alternately. So from one V to the next, a microbatch
    advances by two ranks in its forwards, and returns by one rank in its backwards.

    Five microbatches on four ranks; F, B and W take one unit of time each:

        rank 0  F0F1....V0F2....V1F3....V2F4....V3B0--..V4B1--B2--B3--B4--
        rank 1  ..F0F1..V0..F2..V1..F3..V2B0--F4V3B1--..V4B2--B3--B4--....
        rank 2  ....F0..V0F1....V1F2B0--V2F3B1--V3F4B2--V4B3--B4--........
        rank 3  ......F0V0B0--F1V1B1--F2V2B2--F3V3B3--F4V4B4--............

    1. Fill: forwards; all ranks run V of a microbatch at the same time.
    2. Steady: between two Vs, one forward and one backward.
    3. Drain: the remaining backwards and Vs.
    """
    ranks = tuple(tuple(_order(pipeline_size - 1 - rank, microbatches)) for rank in range(pipeline_size))
    return Schedule("interlaced", VocabMethod.INTERLACED, Placement.round_robin(pipeline_size), microbatches, ranks)


def _order(distance: int, microbatches: int) -> Iterator[Pass]:
    """Passes of the rank that is `distance` ranks before the last. Period i ends with the V of microbatch i."""
    ahead, behind = distance // 2, distance + 1
    for period in range(-ahead, microbatches + behind):
        forward, backward = Pass(PassKind.F, period + ahead), Pass(PassKind.B, period - behind)
        steps = (forward, backward) if distance % 2 else (backward, forward)
        yield from (step for step in (*steps, Pass(PassKind.V, period)) if 0 <= step.microbatch < microbatches)


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
    # What the first stage's rank and all other ranks insert at the start (None) and after a pass of the first stage's
    # rank; `waiting` are the IBs since the last V.
    own: dict[Pass | None, list[Pass]] = {None: start}
    others: dict[Pass | None, list[Pass]] = {None: list(start)}
    latest: Pass | None = None
    waiting: list[Pass] = []
    for step in schedule.ranks[first]:
        if step.kind is PassKind.V:
            latest, own[step], others[step], waiting = step, waiting, list(waiting), []
        elif step.kind is PassKind.F and step.chunk == chunk:
            own[step] = list(islice(embeds, 1))
            others[latest] += own[step]
        elif step.kind is PassKind.B and step.chunk == chunk:
            waiting.append(Pass(PassKind.IB, step.microbatch))
    ranks = []
    for rank, order in enumerate(schedule.ranks):
        behind = own if rank == first else others
        expanded = list(behind[None])
        for step in order:
            expanded += [Pass(kind, step.microbatch) for kind in output] if step.kind is PassKind.V else [step]
            expanded += behind.get(step, ())
        ranks.append((*expanded, *waiting))
    return replace(schedule, vocab=VocabMethod.VOCAB_1, ranks=tuple(ranks))
