"""Orders the passes of a schedule by their real costs, within its memory caps, so that gaps at both ends close.

Working forwards, a list scheduler packs the warm-up and finds the cool-down as it comes; working backwards, the other
way round. Which is better depends on the schedule and its costs: the shorter result counts, and the given order where
neither is shorter.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.dependencies import build_graph
from megatron_vp.schedule.graph import Graph, Step
from megatron_vp.schedule.list_scheduler import Caps, list_schedule
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.playback import durations, play
from megatron_vp.schedule.unfold import EMBEDDED_AHEAD, unfold

EMBEDDING_GRADIENTS = 4
"""Microbatches whose embedding gradient may wait for its IB."""


def squeeze(schedule: Schedule, caps: Caps, costs: PassCosts) -> Schedule:
    """The same passes, ordered for `costs` within `caps`, which the given order must respect."""
    # Without vocabulary passes the order is the published one, whose last stage knows the loss at once.
    graph = build_graph(schedule, with_loss=schedule.vocab is not VocabMethod.NONE)
    if schedule.vocab.is_sharded:
        _limit_embedding(graph, schedule)
    took = durations(graph, schedule, costs)
    orders = graph.numbers(schedule.ranks)
    found = [(max(play(graph, orders, took).end), orders)]
    found += [list_schedule(graph, orders, took, caps, backwards) for backwards in (False, True)]
    shortest = min(makespan for makespan, _ in found)
    best = next(orders for makespan, orders in found if makespan <= shortest * (1 + 1e-9))
    ranks = []
    for numbers, steps, order in zip(orders, schedule.ranks, best, strict=True):
        named = dict(zip(numbers, steps, strict=True))
        ranks.append(tuple(named[number] for number in order))
    return replace(schedule, ranks=tuple(ranks))


def evaluation(schedule: Schedule, costs: PassCosts | None = None) -> Schedule:
    """What evaluation runs: the passes of `schedule.forward_only()`, reordered, as there is no backward to wait for.

    An interlaced schedule becomes a vocab-1 one.
    """
    forward = unfold(schedule).forward_only()
    return squeeze(forward, Caps((forward.microbatches,) * forward.pipeline_size), costs or PassCosts())


def _limit_embedding(graph: Graph, schedule: Schedule) -> None:
    first, chunk = schedule.placement.first_rank, schedule.placement.chunk_of(0)
    for rank in range(schedule.pipeline_size):
        used, embedded = Step(first, Pass(PassKind.F, 0, chunk)), Step(rank, Pass(PassKind.IF, 0))
        graph.link_across(used, embedded, EMBEDDED_AHEAD)
        if schedule.has_backward:
            added, freed = Step(rank, Pass(PassKind.IB, 0)), Step(first, Pass(PassKind.B, 0, chunk))
            graph.link_across(added, freed, EMBEDDING_GRADIENTS)
