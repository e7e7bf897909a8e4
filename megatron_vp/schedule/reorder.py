"""Orders the passes of a schedule by their real costs, within its memory limits, so that gaps at both ends close.

Working forwards, a list scheduler packs the warm-up and finds the cool-down as it comes; working backwards, the other
way round. Which is better depends on the schedule and its costs: the shorter result counts, and the given order where
neither is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.dependencies import build_graph
from megatron_vp.schedule.expand_interlaced import EMBEDDED_AHEAD, expand_interlaced
from megatron_vp.schedule.graph import Graph, Step
from megatron_vp.schedule.list_scheduler import MemoryLimits, Problem, list_schedule
from megatron_vp.schedule.node_times import durations, node_times
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

EMBEDDING_GRADIENTS = 4
"""Microbatches whose embedding gradient may wait for its IB."""


def reorder_for_costs(
    schedule: Schedule,
    limits: MemoryLimits,
    costs: Costs,
    pairs: Sequence[Sequence[tuple[Pass, Pass]]] = (),
) -> Schedule:
    """The same passes, ordered for `costs` within `limits`, which the given order must respect.

    With `StageCosts` every rank's passes are ordered for that rank's own durations.
    `pairs[r]` are passes of rank r that stay next to each other, the first of which is followed by the second.
    """
    # Without vocabulary passes the order is the published one, whose last stage knows the loss at once.
    graph = build_graph(schedule, with_loss=schedule.vocab is not VocabMethod.NONE)
    if schedule.vocab.is_sharded:
        _limit_embedding(graph, schedule)
    _first_weight_gradient_first(graph, schedule)
    took = durations(graph, schedule, costs)
    orders = graph.numbers(schedule.ranks)
    problem, behind = Problem.of(graph, orders, took), dict[int, int]()
    if pairs:
        halves = (graph.numbers([[pair[half] for pair in each] for each in pairs]) for half in (0, 1))
        for forwards, backwards in zip(*halves, strict=True):
            behind |= zip(forwards, backwards, strict=True)
        problem = problem.joined(behind)
    found = [(max(node_times(graph, orders, took).end), orders)]
    for direction in (False, True):
        makespan, better = list_schedule(problem, limits, backwards=direction)
        if behind:
            better = [[each for number in order for each in _parted(number, behind)] for order in better]
            makespan = max(node_times(graph, better, took).end)
        found.append((makespan, better))
    shortest = min(makespan for makespan, _ in found)
    best = next(orders for makespan, orders in found if makespan <= shortest * (1 + 1e-9))
    ranks = []
    for numbers, steps, order in zip(orders, schedule.ranks, best, strict=True):
        named = dict(zip(numbers, steps, strict=True))
        ranks.append(tuple(named[number] for number in order))
    return replace(schedule, ranks=tuple(ranks))


def _parted(number: int, behind: Mapping[int, int]) -> tuple[int, ...]:
    """A pass, and the one that stays behind it."""
    return (number, behind[number]) if number in behind else (number,)


def evaluation(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """What evaluation runs: the passes of `schedule.forward_only()`, reordered, as there is no backward to wait for.

    An interlaced schedule becomes a vocab-1 one.
    """
    forward = expand_interlaced(schedule).forward_only()
    return reorder_for_costs(
        forward, MemoryLimits((forward.microbatches,) * forward.pipeline_size), costs or PassCosts()
    )


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """The forward passes of `schedule` for any number of microbatches, one microbatch after the other."""
    ranks = []
    for rank, stages in enumerate(schedule.placement.stage_of):
        single = [kind for kind in schedule.vocab.passes if kind.forward] if rank in schedule.vocab_ranks else []
        before = [kind for kind in single if kind is PassKind.IF]
        behind = [kind for kind in single if kind is not PassKind.IF]
        chunks = [chunk for _, chunk in sorted(zip(stages, range(len(stages)), strict=True))]
        steps = [(kind, 0) for kind in before] + [(PassKind.F, chunk) for chunk in chunks]
        steps += [(kind, 0) for kind in behind]
        ranks.append(tuple(Pass(kind, place, chunk) for place in range(microbatches) for kind, chunk in steps))
    return replace(schedule, microbatches=microbatches, ranks=tuple(ranks))


def _first_weight_gradient_first(graph: Graph, schedule: Schedule) -> None:
    """Let whole backwards wait for the chunk's W of microbatch 0, which starts the sum over microbatches."""
    for rank, step in schedule.whole_backwards:
        first = Pass(PassKind.W, 0, step.chunk)
        if (rank, first._replace(kind=PassKind.BW)) not in schedule.whole_backwards:
            graph.link(graph.number(Step(rank, first)), graph.number(Step(rank, step)))


def _limit_embedding(graph: Graph, schedule: Schedule) -> None:
    first, chunk = schedule.placement.first_rank, schedule.placement.chunk_of(0)
    for rank in schedule.vocab_ranks:
        used, embedded = Step(first, Pass(PassKind.F, 0, chunk)), Step(rank, Pass(PassKind.IF, 0))
        graph.link_across(used, [embedded], EMBEDDED_AHEAD)
        if schedule.has_backward:
            added = Step(rank, Pass(PassKind.IB, 0))
            freed = [Step(first, Pass(kind, 0, chunk)) for kind in (PassKind.B, PassKind.BW)]
            graph.link_across(added, freed, EMBEDDING_GRADIENTS)
