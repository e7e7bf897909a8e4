"""Check that lowered programs cannot deadlock: play them on ranks that block at every post."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
    """Play the programs on ranks that block at every post until all members of the operation have posted it.

    This worst case covers hosts that wait for their devices at any point, and streams that share one hardware queue.
    """
    ranks, vocab_members = len(programs), programs[0].vocab_members
    sequences: dict[str, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for program in programs:
        mine: set[Operation] = set()
        for instruction in program.instructions:
            if isinstance(instruction, Post):
                operation = instruction.operation
                assert program.rank in operation.members(vocab_members) and operation not in mine, instruction
                mine.add(operation)
                sequences[operation.lane][program.rank].append(operation)
            assert not isinstance(instruction, Wait) or instruction.operation in mine, instruction
    for by_rank in sequences.values():
        posted = list(by_rank.values())
        assert {*by_rank} == {*posted[0][0].members(vocab_members)}, by_rank
        assert all(each == posted[0] for each in posted), by_rank
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
    assert not stuck, [(rank, str(programs[rank].instructions[places[rank]])) for rank in stuck]
