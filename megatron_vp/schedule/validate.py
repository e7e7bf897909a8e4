"""Checks that schedules and programs run each pass once, obey dependencies and memory bounds, and do not deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.instructions import Post, Program, Wait
from megatron_vp.schedule.ledger import activation_levels
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import Schedule, ScheduleError
from megatron_vp.schedule.timeline import Timeline, simulate
from megatron_vp.schedule.transfers import Operation


def validate(schedule: Schedule, costs: Costs | None = None, memory_bound: Sequence[float] | None = None) -> Timeline:
    """Check that a schedule and its lowered programs can run, and return the schedule's timeline.

    `memory_bound[r]` limits the activation memory of rank r; its unit is the activations of one microbatch in all
    chunks of the rank. Raises ScheduleError for a missing, repeated or unexpected pass, a deadlock, or an exceeded
    memory bound.
    """
    timeline = simulate(schedule, costs)
    check_memory(schedule, memory_bound or ())
    validate_programs(lower(schedule, costs))
    return timeline


def check_memory(schedule: Schedule, memory_bound: Sequence[float]) -> None:
    """Raise ScheduleError if rank r holds more activations than `memory_bound[r]`; for the unit, see `validate`."""
    for rank, bound in enumerate(memory_bound):
        for place, (level, _) in enumerate(activation_levels(schedule, rank)):
            if level > bound + 1e-9:
                step = schedule.ranks[rank][place]
                raise ScheduleError(
                    f"rank {rank} holds activations of {level:g} microbatches at {step}, "
                    f"more than its bound of {bound:g}"
                )


def validate_programs(programs: Sequence[Program]) -> None:
    """Simulate the programs on ranks that block at every post until all members of the operation have posted it.

    This worst case covers hosts that wait for their devices at any point, and streams that share one hardware queue.
    Raises ScheduleError for a deadlock, for a wait without an earlier post, or if the members of a lane (see
    `Operation.lane`) do not post the same operations in the same order.
    """
    ranks, vocab_members = len(programs), programs[0].vocab_members
    _check_posts(programs)
    places = [0] * ranks
    arrived: dict[Operation, list[int]] = defaultdict(list)
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
        instructions = programs[rank].instructions
        while places[rank] < len(instructions):
            instruction = instructions[places[rank]]
            if isinstance(instruction, Post):
                waiting = arrived[instruction.operation]
                waiting.append(rank)
                if len(waiting) < len(instruction.operation.members(vocab_members)):
                    break
                for other in waiting[:-1]:
                    places[other] += 1
                runnable.extend(waiting[:-1])
            places[rank] += 1
    stuck = [rank for rank in range(ranks) if places[rank] < len(programs[rank].instructions)]
    if stuck:
        named = ", ".join(f"rank {rank} at {programs[rank].instructions[places[rank]]}" for rank in stuck)
        raise ScheduleError(f"deadlock: ranks wait for each other: {named}")


def _check_posts(programs: Sequence[Program]) -> None:
    """Check that the members of each lane post the same operations in the same order, and wait only for operations that
    they have posted.
    """
    vocab_members = programs[0].vocab_members
    sequences: dict[str, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for program in programs:
        mine: set[Operation] = set()
        for instruction in program.instructions:
            if isinstance(instruction, Post):
                operation = instruction.operation
                if program.rank not in operation.members(vocab_members):
                    raise ScheduleError(f"rank {program.rank} posts {operation}, but is not one of its members")
                if operation in mine:
                    raise ScheduleError(f"rank {program.rank} posts {operation} twice")
                mine.add(operation)
                sequences[operation.lane][program.rank].append(operation)
            elif isinstance(instruction, Wait) and instruction.operation not in mine:
                raise ScheduleError(f"rank {program.rank} waits for {instruction.operation}, which it has not posted")
    for by_rank in sequences.values():
        ranks = next(iter(by_rank.values()))[0].members(vocab_members)
        longest = max(ranks, key=lambda rank: len(by_rank[rank]))
        for rank in ranks:
            for operation, other in zip_longest(by_rank[longest], by_rank[rank]):
                if other is None:
                    raise ScheduleError(f"rank {longest} posts {operation}, which rank {rank} never posts")
                if other != operation:
                    raise ScheduleError(
                        f"rank {rank} posts {other}, but rank {longest} posts {operation} at the same place"
                    )
