"""Orders the passes of a schedule by their real costs, within its memory caps, so that gaps at both ends close.

The given order, played as it is, says when each pass must start at the latest if the whole is not to take longer. A
list scheduler then runs passes ahead of their turn wherever that delays none beyond its latest start. So the result
keeps the steady state of the given order and gains at its ends: F and IF move ahead in the warm-up, T and IB into the
gaps of the cool-down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.dependencies import Graph, Step, build_graph
from megatron_vp.schedule.list_scheduler import Caps, ListScheduler
from megatron_vp.schedule.passes import Pass, PassKind, Schedule
from megatron_vp.schedule.timeline import Playback, durations, next_on_rank, play

EMBEDDED_AHEAD = 2
"""Microbatches whose embedding may be computed before the first stage has used it."""


def squeeze(schedule: Schedule, costs: PassCosts, caps: Caps) -> Schedule:
    """The same passes, ordered for `costs` within `caps`, which the given order must respect.

    Raises ScheduleError where the given order cannot proceed.
    """
    graph = build_graph(schedule, with_loss=True)
    if schedule.vocab.is_sharded:
        _limit_embedding(graph, schedule)
    took = durations(graph, schedule, costs)
    orders = [[graph.index[Step(rank, step)] for step in order] for rank, order in enumerate(schedule.ranks)]
    latest = _latest_starts(graph, orders, took, play(graph, orders, took))
    squeezed = ListScheduler(graph, orders, took, latest, caps).run()
    return replace(schedule, ranks=tuple(tuple(graph.nodes[number].action for number in order) for order in squeezed))


def _limit_embedding(graph: Graph, schedule: Schedule) -> None:
    first, chunk = schedule.placement.first_rank, schedule.placement.chunk_of(0)
    for microbatch in range(EMBEDDED_AHEAD, schedule.microbatches):
        used = graph.index[Step(first, Pass(PassKind.F, microbatch - EMBEDDED_AHEAD, chunk))]
        for rank in range(schedule.pipeline_size):
            graph.link(used, graph.index[Step(rank, Pass(PassKind.IF, microbatch))])


def _latest_starts(
    graph: Graph, orders: Sequence[Sequence[int]], took: Sequence[float], times: Playback
) -> list[float]:
    """When each node must start for all to end within the makespan of `times`, every rank in its order."""
    makespan = max(times.end)
    following = next_on_rank(graph, orders)
    latest = [makespan] * len(took)
    for number in reversed(times.order):
        due = min((latest[successor] for successor in graph.successors[number]), default=makespan)
        after = following[number]
        latest[number] = (due if after is None else min(due, latest[after])) - took[number]
    return latest
