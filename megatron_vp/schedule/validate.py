"""Checks that schedules and programs run each pass once, obey dependencies, and do not deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.instructions import Post, Program, Wait
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import Schedule, ScheduleError
from megatron_vp.schedule.timeline import Timeline, simulate
from megatron_vp.schedule.transfers import Operation


def validate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Check that a schedule and its lowered programs can run, and return the schedule's timeline.

    Raises ScheduleError for a missing, repeated or unexpected pass, and for a deadlock.
    """
    timeline = simulate(schedule, costs)
    validate_programs(lower(schedule, costs))
    return timeline


def validate_programs(programs: Sequence[Program]) -> None:
    """Simulate the programs on ranks that block at every post until all members of the operation have posted it.

    This worst case covers hosts that wait for their devices at any point, and streams that share one hardware queue. If
    the members of a lane (see `Operation.lane`) do not post the same operations in the same order, they never go on.
    Raises ScheduleError for a deadlock, for a wait without an earlier post, and for a post of an operation that the
    rank has already posted or is not a member of.
    """
    ranks, vocab_members = len(programs), programs[0].vocab_members
    places = [0] * ranks
    posted: dict[Operation, list[int]] = defaultdict(list)
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
        instructions = programs[rank].instructions
        while places[rank] < len(instructions):
            instruction = instructions[places[rank]]
            if isinstance(instruction, Wait) and rank not in posted[instruction.operation]:
                raise ScheduleError(f"rank {rank} waits for {instruction.operation}, which it has not posted")
            if isinstance(instruction, Post):
                operation, by = instruction.operation, posted[instruction.operation]
                members = operation.members(vocab_members)
                if rank in by or rank not in members:
                    raise ScheduleError(f"rank {rank} posts {operation} twice, or is not one of its members")
                by.append(rank)
                if len(by) < len(members):
                    break
                for other in by[:-1]:
                    places[other] += 1
                runnable.extend(by[:-1])
            places[rank] += 1
    stuck = [rank for rank in range(ranks) if places[rank] < len(programs[rank].instructions)]
    if stuck:
        named = ", ".join(f"rank {rank} at {programs[rank].instructions[places[rank]]}" for rank in stuck)
        raise ScheduleError(f"deadlock: ranks wait for each other: {named}")
