"""Proves a schedule and its programs: every pass once, dependencies, memory bound, and no deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_vp.schedule.costs import Costs
from megatron_vp.schedule.instructions import Collective, Instruction, Operation, Post, Program, Wait, communicator
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import Schedule, ScheduleError
from megatron_vp.schedule.timeline import Timeline, simulate


def validate(schedule: Schedule, costs: Costs | None = None, memory_bound: Sequence[float] | None = None) -> Timeline:
    """The timeline of a schedule that is proven to run, alone and lowered to programs.

    `memory_bound[r]` is the most activation rank r may hold, in microbatches of a whole rank. Raises ScheduleError for
    a missing, repeated or foreign pass, an order that cannot proceed, and a bound that is passed.
    """
    timeline = simulate(schedule, costs)
    for rank, bound in enumerate(memory_bound or ()):
        for place, (level, _) in enumerate(schedule.activation_levels(rank)):
            if level > bound + 1e-9:
                step = schedule.ranks[rank][place]
                raise ScheduleError(
                    f"rank {rank} holds {level:g} microbatches at {step}, more than its bound of {bound:g}\n"
                    + around(rank, schedule.ranks[rank], place)
                )
    validate_programs(lower(schedule, costs))
    return timeline


def around(rank: int, steps: Sequence[object], place: int) -> str:
    """Line that shows the steps of a rank near `place`, which it marks."""
    first = max(0, place - 6)
    shown = [f">{step}<" if first + k == place else str(step) for k, step in enumerate(steps[first : place + 7])]
    return f"  rank {rank}: {'... ' if first else ''}{' '.join(shown)}{' ...' if place + 7 < len(steps) else ''}"


def members(operation: Operation, ranks: int) -> Sequence[int]:
    """The ranks that post an operation."""
    return range(ranks) if isinstance(operation, Collective) else (operation.source, operation.target)


def validate_programs(programs: Sequence[Program], hosts_wait: bool = False) -> None:
    """Play the programs as ranks would whose streams all share one hardware queue, which is the most they can block.

    A rank goes on behind a wait when the operation is complete, behind the post of a collective, too, because its later
    parts stand behind its first, and behind the post of a message when the message before it on its communicator is. An
    operation is complete when all its members have posted it. Where `hosts_wait`, for their devices, which they may do
    anywhere, it goes on behind no post before the operation is complete.

    Raises ScheduleError where members post different operations as their i-th of a communicator, where an operation is
    never posted by a member, and where ranks wait for each other.
    """
    ranks = len(programs)
    _check_posts(programs)
    places = [0] * ranks
    posted: dict[Operation, int] = defaultdict(int)
    latest: list[dict[tuple, Operation]] = [{} for _ in range(ranks)]
    complete: set[Operation] = set()
    blocked: dict[Operation, list[int]] = defaultdict(list)
    runnable = list(range(ranks))

    def post(rank: int, operation: Operation) -> Operation | None:
        """What the rank waits for before it goes on: an operation, complete or not."""
        channel = communicator(operation)
        before = latest[rank].get(channel)
        if before not in (None, operation) and before not in complete:
            return before
        if before != operation:
            latest[rank][channel] = operation
            posted[operation] += 1
            if posted[operation] == len(members(operation, ranks)):
                complete.add(operation)
                runnable.extend(blocked.pop(operation, ()))
        return operation if hosts_wait or isinstance(operation, Collective) else None

    while runnable:
        rank = runnable.pop()
        instructions = programs[rank].instructions
        while places[rank] < len(instructions):
            instruction = instructions[places[rank]]
            awaited = None
            if isinstance(instruction, Wait):
                awaited = instruction.operation
            elif isinstance(instruction, Post):
                awaited = post(rank, instruction.operation)
            if awaited is not None and awaited not in complete:
                blocked[awaited].append(rank)
                break
            places[rank] += 1
    stuck = [rank for rank in range(ranks) if places[rank] < len(programs[rank].instructions)]
    if stuck:
        named = ", ".join(f"rank {rank} at {programs[rank].instructions[places[rank]]}" for rank in stuck)
        lines = [around(rank, programs[rank].instructions, places[rank]) for rank in stuck]
        raise ScheduleError("\n".join([f"deadlock: {named} wait for each other", *lines]))


def _check_posts(programs: Sequence[Program]) -> None:
    """Every member posts the same operations in the same order on each communicator, and waits only for posted ones."""
    sequences: dict[tuple, dict[int, list[tuple[int, Operation]]]] = defaultdict(lambda: defaultdict(list))
    for program in programs:
        mine: set[Operation] = set()
        for place, instruction in enumerate(program.instructions):
            if isinstance(instruction, Post):
                operation = instruction.operation
                if program.rank not in members(operation, len(programs)):
                    raise _error(program, place, f"posts {operation}, of which it is no member")
                if operation in mine:
                    raise _error(program, place, f"posts {operation} twice")
                mine.add(operation)
                sequences[communicator(operation)][program.rank].append((place, operation))
            elif isinstance(instruction, Wait) and instruction.operation not in mine:
                raise _error(program, place, f"waits for {instruction.operation}, which it has not posted")
    for by_rank in sequences.values():
        some = next(iter(by_rank.values()))[0][1]
        ranks = members(some, len(programs))
        longest = max(ranks, key=lambda rank: len(by_rank[rank]))
        for rank in ranks:
            for position, (place, operation) in enumerate(by_rank[longest]):
                mine = by_rank[rank][position : position + 1]
                if not mine:
                    raise _error(programs[longest], place, f"posts {operation}, which rank {rank} never posts")
                if mine[0][1] != operation:
                    raise _error(
                        programs[rank], mine[0][0], f"posts {mine[0][1]} where rank {longest} posts {operation}"
                    )


def _error(program: Program, place: int, words: str) -> ScheduleError:
    instructions: Sequence[Instruction] = program.instructions
    return ScheduleError(f"rank {program.rank} {words}\n{around(program.rank, instructions, place)}")
