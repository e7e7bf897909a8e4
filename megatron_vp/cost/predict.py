"""Simulates the real schedule of a plan with modelled or measured costs: time, MFU, bubble and memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

from megatron_vp.cost.communication import CommunicationModel
from megatron_vp.cost.constants import CALIBRATED, Constants
from megatron_vp.cost.flops import model_flops
from megatron_vp.cost.fp8 import bf16_layers
from megatron_vp.cost.hardware import Hardware
from megatron_vp.cost.layouts import equal_layers
from megatron_vp.cost.pass_times import PassTimes, Split
from megatron_vp.cost.rank_memory import MemoryModel, RankMemory
from megatron_vp.cost.shapes import Job, Plan
from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    PassCosts,
    Placement,
    Schedule,
    Simulator,
    StageCosts,
    Timeline,
    VocabMethod,
    family,
    generate,
)

IDLE = 0.85
"""A rank with less than this share of the busiest one's work is not throttled."""


@dataclass(frozen=True)
class Prediction:
    """What `plan` makes of `job` on `hardware`. Times in seconds, memory in bytes."""

    job: Job
    plan: Plan
    hardware: Hardware
    timeline: Timeline
    iteration_seconds: float
    memory: tuple[RankMemory, ...]

    @property
    def model_flops(self) -> float:
        """FLOPs of an iteration of the whole job: see `flops.model_flops`."""
        return model_flops(self.job)

    @property
    def mfu(self) -> float:
        """Share of the hardware's nominal peak."""
        return self.mfu_of(self.hardware.peak_flops)

    def mfu_of(self, peak_flops: float) -> float:
        """Model FLOPs a second and GPU, as a share of `peak_flops`."""
        return self.model_flops / self.job.gpus / self.iteration_seconds / peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        job = self.job
        return job.sequence * job.micro_batch * job.microbatches * job.data / self.iteration_seconds

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time between first and last pass in which they do not compute."""
        return self.timeline.bubble_fraction

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Time each rank computes in an iteration."""
        return self.timeline.busy

    @cached_property
    def peak_memory(self) -> float:
        """Largest of the ranks' peaks as PyTorch's allocator counts them."""
        return max(rank.allocated for rank in self.memory)

    def fits(self, limit: float | None = None) -> bool:
        """Whether every rank stays within `limit` bytes, the device's own by default, all of its memory counted."""
        return max(rank.total for rank in self.memory) <= (limit or self.hardware.memory)


def predict(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    constants: Constants = CALIBRATED,
    measured: PassCosts | StageCosts | None = None,
    simulator: Simulator | None = None,
) -> Prediction:
    """Time and memory of `job` run by `plan`.

    Args:
        measured: pass times in seconds that replace the modelled ones, from a trace of a run.
        simulator: the schedule to simulate; without one it is generated for the costs.

    Raises UserError for a schedule that is unknown or does not go with the job, and layers that do not fit it.
    """
    simulator = simulator or make_simulator(job, plan, hardware, constants, measured)
    costs = measured or stage_costs(job, plan, simulator.schedule, hardware, constants)
    timeline = simulator.simulate(costs)
    memory = memory_model(job, plan, simulator.schedule, hardware)
    ranks = tuple(map(memory.rank, range(job.pipeline)))
    after = after_passes(job, plan, simulator.schedule, hardware, constants)
    return Prediction(job, plan, hardware, timeline, timeline.makespan + after, ranks)


def memory_model(job: Job, plan: Plan, schedule: Schedule, hardware: Hardware) -> MemoryModel:
    """The memory of the ranks that run `plan` in the order of `schedule`."""
    return MemoryModel(job, schedule, layers_of(job, plan, schedule.placement), hardware, plan.shard_rows(job))


def after_passes(job: Job, plan: Plan, schedule: Schedule, hardware: Hardware, constants: Constants) -> float:
    """Seconds from the last pass to the end of the iteration, on the rank with most parameters: gradients of the
    replicas summed, and the optimizer's step.
    """
    memory = memory_model(job, plan, schedule, hardware)
    fullest = max(range(job.pipeline), key=memory.parameters)
    experts = memory.expert_parameters(fullest)
    sync = CommunicationModel(job, hardware, constants).gradient_sync(memory.parameters(fullest) - experts, experts)
    return sync + PassTimes(job, hardware, constants).optimizer_step(memory.stepped_parameters(fullest))


def make_simulator(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    constants: Constants = CALIBRATED,
    measured: PassCosts | StageCosts | None = None,
) -> Simulator:
    """The schedule of `plan`, ordered for its costs, ready to be simulated; made once for nearly equal proportions.

    Raises UserError for what training refuses: whole vocabulary layers that share one weight on both chunks of a rank.
    """
    if job.model.tied and plan.vocab is VocabMethod.NONE and not family(plan.schedule).ends_on_last_rank:
        raise UserError(
            "tied embeddings would belong to both chunks of the first rank; add --vocab-parallel or "
            "--untie-embeddings-and-output-weights"
        )
    if measured is None and plan.vocab_rows is not None:
        return _drawn_simulator(job, plan, order_costs(job, plan, hardware, constants))
    single = generate(plan.schedule, job.pipeline, 1, vocab=plan.vocab, chunks=plan.chunks)
    costs = measured or stage_costs(job, plan, single, hardware, constants)
    return _simulator(
        plan.schedule,
        job.pipeline,
        job.microbatches,
        plan.vocab,
        plan.chunks,
        _proportions(costs.nominal(job.pipeline)),
    )


def order_costs(job: Job, plan: Plan, hardware: Hardware, constants: Constants = CALIBRATED) -> StageCosts:
    """What a schedule for `plan` is ordered for: the costs of every stage and rank, in hundredths of a mean rank's
    F + B + W and rounded to one, so that all ranks of a run compute the same order.

    All GPUs are taken to be equally fast: which of them is the slowest is not known before a run.
    """
    alike = replace(constants, speed_spread=0.0, idle_boost=0.0)
    single = generate(plan.schedule, job.pipeline, 1, vocab=plan.vocab, chunks=plan.chunks)
    costs = stage_costs(job, plan, single, hardware, alike)
    whole = sum((*costs.F, *costs.B, *costs.W)) / job.pipeline
    scaled = costs.scaled(100 / whole)
    return StageCosts(
        **{kind: tuple(map(round, values)) for kind, values in scaled.named().items()},
        messages={link: round(value) for link, value in scaled.messages.items()},
        collectives={kind: round(value) for kind, value in scaled.collectives.items()},
    )


def _drawn_simulator(job: Job, plan: Plan, costs: StageCosts) -> Simulator:
    made = generate(
        plan.schedule,
        job.pipeline,
        job.microbatches,
        vocab=plan.vocab,
        chunks=plan.chunks,
        costs=costs.nominal(job.pipeline),
    )
    return Simulator(made, costs)


@lru_cache(maxsize=3)
def _simulator(
    name: str, ranks: int, microbatches: int, vocab: VocabMethod, chunks: int | None, costs: PassCosts
) -> Simulator:
    return Simulator(generate(name, ranks, microbatches, vocab=vocab, chunks=chunks, costs=costs), costs)


def _proportions(costs: PassCosts) -> PassCosts:
    """`costs` in hundredths of a rank's F + B + W, rounded to one hundredth."""
    whole = costs.F + costs.B + costs.W
    rounded = {name: round(100 * value / whole) for name, value in costs.named().items() if name not in costs.other}
    return PassCosts(**rounded, other={name: round(100 * value / whole) for name, value in costs.other.items()})


def layers_of(job: Job, plan: Plan, placement: Placement) -> tuple[int, ...]:
    """Transformer layers by virtual stage. Raises UserError where they do not fit the job or the placement."""
    if plan.layers is None:
        return equal_layers(job, placement.stages)
    if len(plan.layers) != placement.stages or sum(plan.layers) != job.model.layers or min(plan.layers) < 0:
        raise UserError(
            f"layers {list(plan.layers)} are no layout of {job.model.layers} layers on {placement.stages} stages; give "
            "each stage its layers, or leave the layout out"
        )
    return plan.layers


def stage_costs(job: Job, plan: Plan, schedule: Schedule, hardware: Hardware, constants: Constants) -> StageCosts:
    """Seconds of every pass, message and collective of one microbatch, by where `schedule` runs them."""
    placement = schedule.placement
    times, communication = PassTimes(job, hardware, constants), CommunicationModel(job, hardware, constants)
    layer, plain, traffic, gap = times.layer(), times.plain_layer(), communication.layer_traffic(), constants.gap
    stages = []
    layers = layers_of(job, plan, placement)
    for count, wide in zip(layers, bf16_layers(job, layers), strict=True):
        forward, backward, weight = (
            (count - wide) * own + wide * other for own, other in zip(layer, plain, strict=True)
        )
        stages.append(
            Split(
                forward + count * traffic + gap,
                backward + count * traffic + gap,
                weight + schedule.split_backward * gap,
            )
        )
    if plan.vocab is VocabMethod.NONE:
        for stage, extra in ((0, times.whole_embedding()), (-1, times.whole_output())):
            stages[stage] = Split(*(own + more for own, more in zip(stages[stage], extra, strict=True)))
    elif plan.vocab.is_sharded:
        first, placed = stages[0], times.placed_rows()
        stages[0] = Split(first.F + placed, first.B + placed, first.W)
    passes = [(0.0,) * 4] * placement.ranks
    if plan.vocab.is_sharded:
        rows = plan.shard_rows(job)
        by_rows = {each: times.vocabulary_passes(plan.vocab, each) for each in {*rows}}
        if plan.vocab_rows is None:
            by_rows = dict.fromkeys(by_rows, times.vocabulary_passes(plan.vocab))
        passes = [by_rows[each] for each in rows]
    work = [sum(sum(stages[stage]) for stage in row) for row in placement.stage_of]
    pace = _pace([own + sum(each) for own, each in zip(work, passes, strict=True)], constants)
    placed_at = [pace[placement.rank_of(stage)] for stage in range(placement.stages)]
    vocabulary: dict[str, tuple[float, ...]] = {}
    if plan.vocab.is_sharded:
        for place, name in enumerate(("S", "T", "IF", "IB")):
            vocabulary[name] = tuple(each[place] * factor for each, factor in zip(passes, pace, strict=True))
    elif plan.vocab is VocabMethod.INTERLACED:
        whole = sum(times.output_shard(plan.vocab)) + sum(times.synchronous_embedding())
        vocabulary = {"V": tuple(whole * factor + communication.synchronous_vocabulary() for factor in pace)}
    return StageCosts(
        F=tuple(split.F * factor for split, factor in zip(stages, placed_at, strict=True)),
        B=tuple(split.B * factor for split, factor in zip(stages, placed_at, strict=True)),
        W=tuple(split.W * factor for split, factor in zip(stages, placed_at, strict=True)),
        **vocabulary,
        messages=communication.messages(placement),
        collectives=communication.collectives(plan.vocab, _members(plan, placement)),
        other={},
    )


def _members(plan: Plan, placement: Placement) -> Sequence[int]:
    """The ranks of the vocabulary's collectives: those with rows, and those that feed and end the pipeline."""
    if plan.vocab_rows is None:
        return range(placement.ranks)
    ends = {0, placement.ranks - 1, placement.first_rank, placement.last_rank}
    return sorted(ends.union(rank for rank, rows in enumerate(plan.vocab_rows) if rows))


def _pace(work: list[float], constants: Constants) -> list[float]:
    """How much longer each rank takes than a mean rank at sustained speed, by its `work` in a microbatch.

    The slowest of p ranks, by the expected largest of p normal values (Blom's approximation), is put in the middle.
    """
    pace = [1 - constants.idle_boost if own < IDLE * max(work) else 1.0 for own in work]
    slowest = NormalDist().inv_cdf((len(work) - 0.375) / (len(work) + 0.25))
    pace[len(work) // 2] *= 1 + constants.speed_spread * slowest
    return pace
