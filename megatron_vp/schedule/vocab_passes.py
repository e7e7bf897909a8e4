"""Puts the vocabulary passes into any base schedule.

The base block is built with forwards that are longer by the vocabulary work, so that every rank has room for one S, T,
IF and IB a microbatch behind its forward of chunk 0. Between F and B of the last stage as many intervals open as the
method has barriers. Each vocabulary pass then takes the first of its rank's rooms that its dependencies allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.list_scheduler import Caps
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod

TimedPass = tuple[float, Pass]
"""Nominal start of a pass of microbatch 0."""


def nominal_schedule(
    name: str, build: Callable[[PassCosts], BuildingBlock], microbatches: int, vocab: VocabMethod, costs: PassCosts
) -> tuple[Schedule, Caps]:
    """Every rank's passes in nominal order, and the memory each rank may use: the block's plus a microbatch a barrier.

    The order is valid and repeats with the work of one microbatch; `squeeze` then makes use of what real times leave.
    """
    costs = _without_zeros(costs)
    work = costs.S + costs.T + costs.IF + costs.IB if vocab.is_sharded else 0.0
    block = build(replace(costs, F=costs.F + work))
    delay = vocab.barriers * block.step
    rooms = _Rooms(block, costs, delay)
    ranks = []
    for rank, stages in enumerate(block.placement.stage_of):
        timed = rooms.passes(rank) if vocab.is_sharded else []
        for chunk, stage in enumerate(stages):
            timed.append((block.forward[stage], Pass(PassKind.F, 0, chunk)))
            timed.append((block.backward[stage] + delay, Pass(PassKind.B, 0, chunk)))
            if block.weight is not None:
                timed.append((block.weight[stage] + delay, Pass(PassKind.W, 0, chunk)))
        ranks.append(_repeat(timed, block, microbatches))
    schedule = Schedule(name, vocab, block.placement, microbatches, tuple(map(tuple, ranks)), block.weight is not None)
    return schedule, Caps(tuple(held + vocab.barriers * block.placement.chunks for held in block.held))


def _without_zeros(costs: PassCosts) -> PassCosts:
    """Nominal times only order the passes: a floor keeps those that depend on each other apart, rounding included."""
    floor = 1e-3 * max(costs.F + costs.B + costs.W, costs.S + costs.T, 1e-9)
    return replace(costs, **{f.name: max(getattr(costs, f.name), floor) for f in fields(costs) if f.name != "comm"})


@dataclass(frozen=True, slots=True)
class _Rooms:
    """A rank's room opens at the end of its forward of chunk 0, once an interval, and holds S, T, IF and IB in turn.

    S comes within one interval of the last stage's forward and T within the next, wherever in the interval a rank's
    room is: that is what an interval a barrier buys. So two microbatches at most are between S and T.
    """

    block: BuildingBlock
    costs: PassCosts
    delay: float

    def passes(self, rank: int) -> list[TimedPass]:
        block, costs = self.block, self.costs
        step, chunks = block.step, block.placement.chunks
        opens = block.forward[block.placement.stage_of[rank][0]] + costs.F / chunks
        output = block.forward[-1] + costs.F / chunks
        # The loss function runs on rank p-1 between two passes: at the latest, where that rank has run its own S.
        loss = output + step + costs.S
        backward = block.backward[0] + self.delay + (costs.B + costs.W) / chunks
        embedding = opens + costs.S + costs.T
        return [
            (self.first(embedding, -step - costs.IF), Pass(PassKind.IF, 0)),
            (self.first(opens, output), Pass(PassKind.S, 0)),
            (self.first(opens + costs.S, loss), Pass(PassKind.T, 0)),
            # Nothing waits for IB. Two intervals later it is out of the way when the last backwards run.
            (self.first(embedding + costs.IF, backward + 2 * step), Pass(PassKind.IB, 0)),
        ]

    def first(self, opens: float, after: float) -> float:
        """First time not before `after` that is a whole number of intervals from `opens`."""
        return opens + math.ceil((after - opens) / self.block.step - 1e-6) * self.block.step


def _repeat(timed: list[TimedPass], block: BuildingBlock, microbatches: int) -> list[Pass]:
    repeated = []
    for microbatch in range(microbatches):
        arrival = block.arrival(microbatch)
        repeated += [(start + arrival, Pass(first.kind, microbatch, first.chunk)) for start, first in timed]
    return [step for _, step in sorted(repeated, key=lambda item: item[0])]
