"""Check that lowered programs cannot deadlock: play them on ranks that block at every post."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from megatron_vp.schedule import (
    Operation,
    Post,
    Program,
    Schedule,
    ScheduleError,
    Timeline,
    Wait,
    lower,
    simulate,
)
from megatron_vp.schedule.ledger import activation_levels


def validate(schedule: Schedule, costs=None, memory_bound: Sequence[float] = ()) -> Timeline:
    """Check that a schedule and its lowered programs can run, and return its timeline.

    `memory_bound[r]` limits the activation memory of rank r; its unit is the activations of one microbatch in all
    chunks of the rank.
    """
    timeline = simulate(schedule, costs)
    for rank, bound in enumerate(memory_bound):
        for step, (level, _) in zip(schedule.ranks[rank], activation_levels(schedule, rank), strict=True):
            if level > bound + 1e-9:
                raise ScheduleError(f"rank {rank} holds activations of {level:g} microbatches at {step}")
    validate_programs(lower(schedule, costs))
    return timeline


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
