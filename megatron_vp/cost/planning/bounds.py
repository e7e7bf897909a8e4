"""Computes lower bounds on an iteration's time and memory without a simulation.

Between a stage's F and B of a microbatch, all later stages run their F and B of this microbatch, so a rank holds each
microbatch for at least a known time. By Little's law, the average number of microbatches that a rank holds is the total
number of microbatches times the time for which each is held, divided by the iteration's time. The peak is at least as
high as the average, so a short iteration needs a lot of memory, and a schedule that holds few microbatches takes a long
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.predict import after_passes, memory_model
from megatron_vp.cost.planning.samples import sampled
from megatron_vp.cost.planning.stage_costs import single_microbatch, stage_costs
from megatron_vp.cost.ranks.outside import FRAGMENTS
from megatron_vp.cost.ranks.rank_memory import WORKSPACES
from megatron_vp.schedule import VocabMethod
from megatron_vp.schedule.interlaced import EMBEDDED_AHEAD
from megatron_vp.schedule.reorder import EMBEDDING_GRADIENTS

OUTSIDE = {"IF": EMBEDDED_AHEAD, "T": 2, "IB": EMBEDDING_GRADIENTS}
"""Maximum number of IF passes before a rank's first forward, and of T and IB passes after its last backward."""

SLOWEST = 1.5
"""The frontier leaves out runs whose time is above this multiple of the fastest run's time."""

ROUNDING = 1e-9
"""Tolerance for rounding: bounds and simulations add the same seconds in different orders."""


@dataclass(frozen=True, order=True)
class HeldBytes:
    """A rank's memory during an iteration. The rank holds `always` bytes all the time, and activations for part of the
    time. `byte_seconds` is the integral of the activations' bytes over time, for the simulated microbatches only. For
    at least `idle` seconds, the rank runs microbatches that are not simulated or holds no activations.
    """

    always: float
    byte_seconds: float
    idle: float


@dataclass(frozen=True, order=True)
class Bound:
    """An iteration takes at least `seconds`. If it takes t seconds, it needs at least `memory_within(t)` bytes.

    memory: the fewest bytes that the fullest rank can need, however long the iteration takes.
    ranks: each rank's memory, from which `memory_within` is computed.
    expected: the estimated bytes on the fullest rank, which are not a bound. The estimate assumes that every rank holds
        as many activations as the schedule family allows, which is the case in most pass orders.
    """

    seconds: float
    memory: float
    ranks: tuple[HeldBytes, ...] = ()
    expected: float = 0.0

    def memory_within(self, seconds: float) -> float:
        """The fewest bytes that the fullest rank can need if an iteration takes no more than `seconds`."""
        least = self.memory
        for rank in self.ranks:
            if rank.idle < seconds:
                least = max(least, rank.always + rank.byte_seconds / (seconds - rank.idle))
        return least


def bound(plan: Plan, job: Job, hardware: Hardware) -> Bound:
    """Lower bounds on a plan's time and memory. Raises UserError if the job cannot run `plan`.

    A rank does its work for all microbatches after every earlier stage has run its first forward, and before the
    earlier stages run their last backwards. It may run a few vocabulary passes (OUTSIDE) before its first forward and
    after its last backward. Of the stages whose chunks may be offloaded to host memory, only the activations during the
    passes count.
    """
    plan.check(job)
    away, plan = plan.offload_chunks, replace(plan, offload_chunks=0)
    single, peaks = single_microbatch(plan, job), plan.request(job).promised_peaks
    placement, costs = single.placement, stage_costs(job, plan, single, hardware)
    if costs.hidden:  # A backward may run as one with the forward that saves most.
        forward = max(saved for saved, _ in costs.hidden)
        shorter = (max(0.0, B - own - forward) for B, (_, own) in zip(costs.B, costs.hidden, strict=True))
        costs = replace(costs, B=tuple(shorter))
    memory = memory_model(job, plan, single, hardware)
    split, sharded = single.split_backward, plan.vocab.is_sharded
    whole = costs.B if split else tuple(map(sum, zip(costs.B, costs.W, strict=True)))
    before, behind = ([0.0, *accumulate(times)] for times in (costs.F, whole))
    # The shortest time between F and B of a microbatch on the last stage, while all ranks run S and, with vocab-1, T.
    # With vocab-2, T may come after the last backward.
    scored = [s + (t if plan.vocab is VocabMethod.VOCAB_1 else 0.0) for s, t in zip(costs.S, costs.T, strict=True)]
    turn, gradient = max(scored, default=0.0), 4 if job.wide_gradients else job.element_bytes
    work = [sum(costs.duration(single, rank, step) for step in single.ranks[rank]) for rank in range(job.pipeline)]
    after = after_passes(job, plan, single, hardware)
    simulated = sampled(job).microbatches
    # In seconds: the busiest rank's work on microbatches that are not simulated, plus the work after all passes.
    later = (job.microbatches - simulated) * max(work) + after
    seconds, least, expected, ranks = job.microbatches * max(work) + after, 0.0, 0.0, []
    for rank, stages in enumerate(placement.stage_of):
        first, own = min(stages), memory.rank(rank)
        outside = (
            sum(most_outside * costs.named()[kind][rank] for kind, most_outside in OUTSIDE.items()) if sharded else 0.0
        )
        # If backwards are split, Ws may fill the time in which earlier stages run their last Bs.
        drain = 0.0 if split else behind[first]
        seconds = max(seconds, before[first] + job.microbatches * work[rank] + drain - outside + after)
        held, byte_seconds, by_stage = 0.0, 0.0, list[float]()
        for stage in stages:
            stays = before[-1] - before[stage] + turn + behind[-1] - behind[stage]
            weight = costs.W[stage] if split else 0.0
            held += stays + weight
            of_layers = memory.stages[stage]
            by_stage.append(stays * of_layers.kept + weight * min(of_layers.kept, of_layers.waiting))
            byte_seconds += costs.F[stage] * of_layers.forward + whole[stage] * of_layers.backward
        idle = later + before[first] + drain
        byte_seconds += sum(sorted(by_stage)[: len(stages) - away])
        if not away:
            seconds = max(seconds, idle + simulated * held / peaks[rank])
        buffers, *_, logits = sorted(memory.shared(rank))
        if sharded:
            byte_seconds += scored[rank] * (logits - buffers)  # Logits are held from S to T.
        weights = own.parameters + own.optimizer + gradient * memory.parameters(rank)
        always = weights + (1 + FRAGMENTS) * (own.communication + WORKSPACES + buffers) + own.outside
        byte_seconds *= 1 + FRAGMENTS
        least = max(least, always if away else own.total)
        expected = max(expected, always + (1 + FRAGMENTS) * (logits - buffers) + byte_seconds / held * peaks[rank])
        ranks.append(HeldBytes(always, simulated * byte_seconds, idle))
    return Bound(seconds, least, tuple(ranks), expected)


def time_and_memory(run: Any) -> tuple[float, float]:
    """The iteration time and peak memory of an evaluated run."""
    return run.iteration_seconds, run.peak_memory


def frontier[Run](runs: Iterable[Run], point: Callable[[Run], tuple[float, float]] = time_and_memory) -> list[Run]:
    """Return the runs that no other run beats in both time and memory, fastest first."""
    found: list[Run] = []
    for run in sorted(runs, key=point):
        if not found or point(run)[1] < point(found[-1])[1]:
            found.append(run)
    return found


@dataclass
class Front:
    """The simulated runs whose memory is at most `limit` and that no other run beats in both time and memory, fastest
    first.
    """

    limit: float
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, memory: float) -> None:
        """Add a simulated run."""
        if memory <= self.limit:
            self.points = frontier([*self.points, (seconds, memory)], lambda point: point)

    def may_gain(self, bound: Bound) -> bool:
        """Whether a run with these lower bounds may improve the front.

        A run whose time lies between those of two neighbouring points improves the front only if it needs less memory
        than the faster point. The longer a run takes, the lower its bound on memory, so it is enough to check this
        bound at the slower point's time.
        """
        if not self.points:
            return bound.memory <= self.limit
        last = SLOWEST * self.points[0][0]
        times = [seconds for seconds, _ in self.points if seconds < last] + [last]
        most = [math.nextafter(self.limit, math.inf), *(memory for _, memory in self.points)]
        return any(
            bound.seconds <= seconds * (1 + ROUNDING) and bound.memory_within(seconds) * (1 - ROUNDING) < memory
            for seconds, memory in zip(times, most, strict=False)
        )

    def expects(self, bound: Bound) -> bool:
        """Like `may_gain`, but treats `bound.expected` as another lower bound on memory."""
        return self.may_gain(replace(bound, memory=max(bound.memory, bound.expected)))
