"""The memory ledger: what every pass allocates, and which pass frees it.

All that counts memory reads it here: the list scheduler's limits, peaks and proofs of a schedule, the cost model, the
runtime's own count. A pass takes what its kind `holds`, and gives back what its kind `releases` of the same microbatch
and chunk. Where several passes release it, the last of them gives it back, as a W does where the backward is split.
If a pass waits for its memory through an operation, the memory is taken at the pass from which the operation fills it:
    the host's copy of activations at their F, not at the O that waits until they have left.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vp.schedule.pass_kinds import Held, PassKind
from megatron_vp.schedule.passes import Pass, Schedule


def lives(order: Sequence[Pass], held: Held) -> list[tuple[int, int]]:
    """Places in a rank's order of the passes that take this memory, each with that of the pass that gives it back.

    The two are the same where no pass gives it back, as in an evaluation: it is held while the pass runs.
    """
    kinds = {step.kind for step in order}
    takers = {kind for kind in kinds if held in kind.holds}
    fillers = {PassKind(name) for kind in takers if kind.through for name in kind.waits_for}
    concerned = takers | fillers | {kind for kind in kinds if held in kind.releases}
    ends: dict[int, int] = {}
    taken_at: dict[tuple[int, int], int] = {}
    filled_from: dict[tuple[int, int], int] = {}
    for place, step in enumerate(order):
        if step.kind in concerned:
            account = step.microbatch, step.chunk
            if step.kind in fillers:
                filled_from[account] = place
            elif step.kind in takers:
                first = filled_from.get(account, place) if step.kind.through else place
                taken_at[account] = ends[first] = first
            elif account in taken_at:
                ends[taken_at[account]] = place
    return list(ends.items())


def changes(order: Sequence[Pass], held: Held) -> list[tuple[int, int]]:
    """What each pass of a rank's order takes of this memory from its start on, and what it gives back when it ends, in
    microbatches of a chunk or shard.
    """
    taken, given = [0] * len(order), [0] * len(order)
    for first, last in lives(order, held):
        taken[first] += 1
        given[last] += 1
    return list(zip(taken, given, strict=True))


def levels(order: Sequence[Pass], held: Held) -> list[tuple[int, int]]:
    """The level of this memory during and after each pass of a rank's order."""
    found, level = [], 0
    for taken, given in changes(order, held):
        during = level + taken
        level = during - given
        found.append((during, level))
    return found


def peak(order: Sequence[Pass], held: Held) -> int:
    """The peak level of this memory."""
    return max((during for during, _ in levels(order, held)), default=0)


def activation_levels(schedule: Schedule, rank: int, held: Held = Held.ACTIVATIONS) -> list[tuple[float, float]]:
    """Activations held during and after each pass of `rank`, in microbatches of a whole rank.

    A chunk holds 1/chunks. `held` says whether on the device or in the host's memory.
    """
    found = levels(schedule.ranks[rank], held)
    return [(during / schedule.chunks, after / schedule.chunks) for during, after in found]
