"""Counts the pieces of memory that a rank holds, such as one chunk's activations, and finds the passes that allocate
and free each piece.

A pass allocates the memory that its kind `holds`, and frees the memory that its kind `releases` for the same microbatch
and chunk. If several passes release the same memory, the last of them frees it; with a split backward, this is W.

If an operation between two passes fills the memory, the first of the two passes counts as allocating it. For example,
host memory counts as allocated by the F that computes the activations, not by the O that waits for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vp.schedule.pass_kinds import Held, PassKind
from megatron_vp.schedule.passes import Pass, Schedule


def lives(order: Sequence[Pass], held: Held) -> list[tuple[int, int]]:
    """For each piece of memory of the kind `held`, the passes that allocate and free it, as positions in a rank's
    order.

    If no pass frees the memory, as in an evaluation, both are the allocating pass.
    """
    kinds = {step.kind for step in order}
    takers = {kind for kind in kinds if held in kind.holds}
    fillers = {PassKind(name) for kind in takers if kind.through for name in kind.waits_for}
    concerned = takers | fillers | {kind for kind in kinds if held in kind.releases}
    ends: dict[int, int] = {}
    taken_at: dict[tuple[int, int], int] = {}
    filled_from: dict[tuple[int, int], int] = {}
    for place, (kind, microbatch, chunk) in enumerate(order):
        if kind in concerned:
            account = microbatch, chunk
            if kind in fillers:
                filled_from[account] = place
            elif kind in takers:
                first = filled_from.get(account, place)
                taken_at[account] = ends[first] = first
            elif account in taken_at:
                ends[taken_at[account]] = place
    return list(ends.items())


def changes(order: Sequence[Pass], held: Held) -> list[tuple[int, int]]:
    """For each pass, how many pieces of memory of the kind `held` it allocates at its start, and how many it frees at
    its end.
    """
    taken, given = [0] * len(order), [0] * len(order)
    for first, last in lives(order, held):
        taken[first] += 1
        given[last] += 1
    return list(zip(taken, given, strict=True))


def levels(order: Sequence[Pass], held: Held) -> list[tuple[int, int]]:
    """For each pass, how many pieces of memory of the kind `held` are in use during the pass and after it."""
    found, level = [], 0
    for more, less in changes(order, held):
        found.append((level + more, level + more - less))
        level += more - less
    return found


def peak(order: Sequence[Pass], held: Held) -> int:
    """The largest number of pieces of memory of the kind `held` that are in use at the same time."""
    return max((during for during, _ in levels(order, held)), default=0)


def peaks(schedule: Schedule, held: Held) -> tuple[int, ...]:
    """The `peak` of every rank."""
    return tuple(peak(order, held) for order in schedule.ranks)
