"""Expands interlaced schedules: replaces each vocabulary pass V, which the runtime cannot run, by S, T, IF and IB."""

from __future__ import annotations

from dataclasses import replace

from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

EMBEDDED_AHEAD = 2
"""Number of microbatches by which embedding runs ahead of the first stage."""


def expand_interlaced(schedule: Schedule) -> Schedule:
    """Replace each V of an interlaced schedule by S and T, and add IF and IB; return other schedules unchanged.

    The result is a vocab-1 schedule: T waits for the S of all ranks, and B of the last stage waits for the T of all
    ranks. These waits synchronise all ranks as V does. The IB of each microbatch is inserted after the first V that
    follows the microbatch's B on stage 0. If no V follows, the IB comes last.
    """
    if schedule.vocab is not VocabMethod.INTERLACED:
        return schedule
    on_first, elsewhere, last = _embedding_passes(schedule)
    output = (PassKind.S, PassKind.T) if schedule.has_backward else (PassKind.S,)
    ranks = []
    for rank, order in enumerate(schedule.ranks):
        behind = on_first if rank == schedule.placement.first_rank else elsewhere
        expanded = list(behind[None])
        for step in order:
            expanded += [Pass(kind, step.microbatch) for kind in output] if step.kind is PassKind.V else [step]
            expanded += behind.get(step, ())
        ranks.append((*expanded, *last))
    return replace(schedule, vocab=VocabMethod.VOCAB_1, ranks=tuple(ranks))


Behind = dict[Pass | None, list[Pass]]
"""Maps a pass to the passes that are inserted after it, and None to the passes that are inserted at the start."""


def _embedding_passes(schedule: Schedule) -> tuple[Behind, Behind, list[Pass]]:
    """Return the IFs and IBs to insert on the first stage's rank, those to insert on other ranks, and the IBs that
    every rank runs last.

    Other ranks run each IF or IB right after the V that precedes it on the first stage's rank.
    """
    first = schedule.placement.first_rank
    chunk = schedule.placement.chunk_of(0)
    order = schedule.ranks[first]
    forwards = [step for step in order if step.kind is PassKind.F and step.chunk == chunk]
    embeds = [Pass(PassKind.IF, step.microbatch) for step in forwards]
    on_first: Behind = {None: embeds[:EMBEDDED_AHEAD]}
    on_first |= {step: [later] for step, later in zip(forwards, embeds[EMBEDDED_AHEAD:], strict=False)}
    elsewhere: Behind = {None: list(on_first[None])}
    added: list[Pass] = []
    passed = None
    for step in order:
        if step.kind is PassKind.V:
            passed = step
            on_first[step], added = added, []
            elsewhere[step] = []
        elif step.kind is PassKind.B and step.chunk == chunk:
            added.append(Pass(PassKind.IB, step.microbatch))
        elsewhere[passed] += on_first.get(step, ())
    return on_first, elsewhere, added
