"""Computes the seconds of every pass, message and collective of a plan, and the costs by which passes are ordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import erfc, prod, sqrt

from megatron_vp.cost.hardware.constants import Constants
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.layer_types import stage_layers
from megatron_vp.cost.layers.layouts import equal_layers
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.ranks.communication import CONTENTION
from megatron_vp.cost.ranks.pass_times import PassTimes, Split
from megatron_vp.cost.ranks.rank_memory import MemoryModel
from megatron_vp.errors import UserError
from megatron_vp.schedule import Costs, PassCosts, Placement, Schedule, ScheduleRequest, StageCosts, VocabMethod

IDLE = (0.8, 0.9)
"""The clock of a rank is not throttled if its work is at most the first fraction of the busiest rank's work, and fully
throttled from the second fraction on.
"""


def layers_of(job: Job, plan: Plan, placement: Placement) -> tuple[int, ...]:
    """Number of layers of every virtual stage. Raises UserError if the layers do not fit the job or the placement."""
    if plan.layers is None:
        return equal_layers(job, placement.stages)
    if len(plan.layers) != placement.stages or sum(plan.layers) != job.model.layers or min(plan.layers) < 0:
        raise UserError(
            f"the layout {list(plan.layers)} does not match {job.model.layers} layers on {placement.stages} stages; "
            "give the number of layers of each stage, or leave the layout out"
        )
    return plan.layers


def single_microbatch(plan: Plan, job: Job) -> Schedule:
    """The schedule of `plan` for one microbatch, which shows the stages and the passes of every rank."""
    return schedule_of(plan.request(job, microbatches=1))


@lru_cache(maxsize=256)
def schedule_of(request: ScheduleRequest) -> Schedule:
    """The schedule of a request. Cached, because generating a schedule takes longer than simulating it."""
    return request.schedule()


def stage_costs(job: Job, plan: Plan, schedule: Schedule, hardware: Hardware) -> StageCosts:
    """Seconds of every pass, message and collective of one microbatch, on the stages and ranks of `schedule`."""
    placement, layers = schedule.placement, layers_of(job, plan, schedule.placement)
    times = PassTimes(replace(job, expert_overlap=job.overlaps_experts and job.pipeline == 1), hardware)
    stages = stage_times(times, plan.vocab, layers, schedule.split_backward)
    passes = [(0.0,) * 4] * placement.ranks
    if plan.vocab.is_sharded:
        rows = [None] * placement.ranks if plan.vocab_rows is None else plan.shard_rows(job)
        by_rows = {each: times.vocabulary_passes(plan.vocab, each) for each in {*rows}}
        passes = [by_rows[each] for each in rows]
    work = [sum(sum(stages[stage]) for stage in row) for row in placement.stage_of]
    pace = _pace([own + sum(each) for own, each in zip(work, passes, strict=True)], job.gpus, hardware.constants)
    vocabulary: dict[str, tuple[float, ...]] = {}
    if plan.vocab.is_sharded:
        slowed = [[took * factor for took in each] for each, factor in zip(passes, pace, strict=True)]
        vocabulary = dict(zip(("S", "T", "IF", "IB"), zip(*slowed, strict=True), strict=True))
    elif plan.vocab is VocabMethod.INTERLACED:
        whole = sum(times.output_shard(plan.vocab)) + sum(times.synchronous_embedding())
        vocabulary = {"V": tuple(whole * factor + times.synchronous_vocabulary() for factor in pace)}
    copies: dict[tuple[bool, int, int], float] = {}
    if plan.offload_chunks:
        copies = copy_seconds(MemoryModel(job, schedule, layers, hardware))

    def slow(found: list[Split]) -> list[Split]:
        factors = (pace[placement.rank_of(stage)] for stage in range(len(found)))
        return [Split(*(took * factor for took in split)) for split, factor in zip(found, factors, strict=True)]

    alone = slow(stages)
    hidden: list[tuple[float, float]] = []
    if plan.runs_pairs(job):
        paired = slow(stage_times(PassTimes(job, hardware), plan.vocab, layers, schedule.split_backward))
        for single, own in zip(alone, paired, strict=True):
            saved = single.F - own.F, single.B - own.B
            exchanged = sum(saved) / (1 - CONTENTION)
            # No more of the exchange can hide than the pair computes.
            share = min(1.0, sum(single) / exchanged - 1) if exchanged else 0.0
            hidden.append((share * saved[0], share * saved[1]))
    F, B, W = zip(*alone, strict=True)
    return StageCosts(
        F,
        B,
        W,
        **vocabulary,
        messages=times.messages(placement),
        collectives=times.collectives(plan.vocab, _members(plan, placement)),
        copies=copies,
        hidden=tuple(hidden),
    )


def copy_seconds(memory: MemoryModel) -> dict[tuple[bool, int, int], float]:
    """Seconds that a microbatch's copies to the host and back take; the keys are those of `StageCosts.copies`."""
    host, found = memory.hardware.host, {}
    for rank, stages in enumerate(memory.schedule.placement.stage_of):
        for chunk, stage in enumerate(stages):
            found[True, rank, chunk] = memory.offloaded(stage) / host.out
            found[False, rank, chunk] = memory.offloaded(stage) / host.back
    return found


def order_costs(job: Job, plan: Plan, hardware: Hardware) -> Costs:
    """The costs by which the passes of `plan`'s schedule are ordered, in training and in simulation.

    The costs are rounded, so that all ranks compute the same order. Their unit is 1/100 of F + B + W, averaged over the
    ranks. All GPUs are assumed to be equally fast, because it is not known before a run which of them is the slowest.
    """
    single = single_microbatch(plan, job)
    costs = stage_costs(job, plan, single, hardware.alike)
    # Layers in fp8 and in 16 bits count as equal here.
    held = stage_layers(replace(job, fp8=None), layers_of(job, plan, single.placement))
    if plan.vocab_rows is None and all(stage == held[0] for stage in held):
        mean = costs.nominal(job.pipeline)
        unit = 0.01 * (mean.F + mean.B + mean.W)
        rounded = {name: float(round(value / unit)) for name, value in mean.named().items() if name not in mean.other}
        return PassCosts(**rounded, other={name: round(value / unit, 2) for name, value in mean.other.items()})
    scale = 100 * job.pipeline / sum((*costs.F, *costs.B, *costs.W))
    return StageCosts(
        **{kind: tuple(float(round(scale * value)) for value in values) for kind, values in costs.named().items()},
        messages={link: round(scale * value) for link, value in costs.messages.items()},
        collectives={kind: round(scale * value) for kind, value in costs.collectives.items()},
        # Unlike all other times, copy times keep two decimals, because they are only a few hundredths of F + B + W.
        copies={copy: round(scale * value, 2) for copy, value in costs.copies.items()},
        hidden=(),
    )


def stage_times(times: PassTimes, vocab: VocabMethod, layers: tuple[int, ...], split_backward: bool) -> list[Split]:
    """Seconds of F, B and W of every virtual stage, assuming that all GPUs are equally fast.

    Vocabulary passes are not included. If the vocabulary is not split, the first and the last stage include the
    vocabulary layers.
    """
    held = stage_layers(times.job, layers)
    gap, stages = times.gap, []
    for F, B, W in times.layers(held):
        stages.append(Split(F + gap, B + gap, W + split_backward * gap))
    if vocab is VocabMethod.NONE:
        model, embedding = times.job.model, times.whole_embedding()
        heads = [(-1 - model.behind_mtp, embedding)] * len(model.mtp_heads)
        for stage, extra in ((0, embedding), *heads, (-1, times.whole_output())):
            stages[stage] = Split(*(own + more for own, more in zip(stages[stage], extra, strict=True)))
    elif vocab.is_sharded:
        first, placed = stages[0], times.placed_rows()
        stages[0] = Split(first.F + placed, first.B + placed, first.W)
    return stages


def _members(plan: Plan, placement: Placement) -> Sequence[int]:
    """Ranks in the vocabulary layers' collectives: those with rows, and those of the first and the last stage."""
    if plan.vocab_rows is None:
        return range(placement.ranks)
    return placement.vocab_members([rank for rank, rows in enumerate(plan.vocab_rows) if rows])


def _pace(work: list[float], gpus: int, constants: Constants) -> list[float]:
    """The factor by which each rank's pass times are multiplied; `work` is every rank's time per microbatch.

    The factor of a mostly idle rank (see `IDLE`) is below 1. One rank takes as long as the last of all GPUs is expected
    to take: the rank nearest the middle among those whose work is within `speed_spread` of the largest.
    """
    full, none = IDLE
    idle = [min(1.0, max(0.0, (none - own / max(work)) / (none - full))) for own in work]
    pace = [1 - constants.idle_boost * share for share in idle]
    taken = [own * factor for own, factor in zip(work, pace, strict=True)]
    near = [rank for rank, own in enumerate(taken) if own >= (1 - constants.speed_spread) * max(taken)]
    late = min(near, key=lambda rank: abs(rank - len(work) // 2))
    pace[late] *= expected_maximum(tuple(taken), gpus // len(work), constants.speed_spread) / taken[late]
    return pace


@lru_cache(maxsize=4096)
def expected_maximum(work: tuple[float, ...], gpus: int, spread: float) -> float:
    """The expected time of the last GPU, if each of a rank's `gpus` GPUs takes the rank's `work` times 1 + `spread` x,
    where x is normally distributed.

    The integral of the probability that the last GPU takes longer than a time, from times at which this is certain.
    """
    if not spread:
        return max(work)
    most, step, first, last = max(work), 0.25, -6, 8
    ranks = Counter(own / most for own in work if own)
    later = 0.0
    for place in range(round((last - first) / step)):
        time = 1 + spread * (first + (place + 0.5) * step)
        done = [(0.5 * erfc((1 - time / own) / spread / sqrt(2))) ** (gpus * count) for own, count in ranks.items()]
        later += (1 - prod(done)) * step
    return most * (1 + spread * (first + later))
