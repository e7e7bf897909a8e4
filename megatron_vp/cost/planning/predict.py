"""Predicts a plan's time, how the time is spent, and its memory, by simulating its real schedule with modelled or
measured costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.flops import model_flops
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.samples import added_busy, extended, sampled
from megatron_vp.cost.planning.stage_costs import (
    copy_seconds,
    layers_of,
    order_costs,
    schedule_of,
    stage_costs,
    stage_times,
)
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.cost.ranks.rank_memory import MemoryModel, RankMemory
from megatron_vp.schedule import Schedule, Simulator, StageCosts, Timeline, VocabMethod
from megatron_vp.schedule.graph import gc_paused

SMALL = 0.05
"""A bottleneck is named only if it takes at least this fraction of the iteration time."""


@dataclass(frozen=True)
class RankCopies:
    """Copies between device and host on one rank.

    host: peak bytes in host memory.
    load: ratio of copy time to computing time.
    """

    host: float
    load: float


@dataclass
class Prediction:
    """The prediction for one plan of a job, with times in seconds and memory in bytes.

    step: time after the passes, for gradient synchronisation and the optimizer.
    memory: by pipeline rank.
    timeline, simulator: of all microbatches of the job, or of some of them (see `samples`). A worker process does not
        send them back.
    settings: in a search, the parallel sizes in which the run's configuration differs from the job's.
    given: whether this is the job as its configuration describes it.
    """

    job: Job
    plan: Plan
    hardware: Hardware
    iteration_seconds: float
    step: float
    memory: tuple[RankMemory, ...]
    timeline: Timeline = field(compare=False, repr=False)
    simulator: Simulator = field(compare=False, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    given: bool = False

    def __getstate__(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("busy", "seconds", "copies")}
        return self.__dict__ | figures | {"timeline": None, "simulator": None}

    @property
    def mfu(self) -> float:
        """Model FLOP/s per GPU, counted as in Megatron, as a share of the hardware's nominal peak."""
        return model_flops(self.job) / self.job.gpus / self.iteration_seconds / self.hardware.peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of the whole job."""
        job = self.job
        return job.sequence * job.micro_batch * job.microbatches * job.data / self.iteration_seconds

    @property
    def allocated(self) -> float:
        """The largest peak of any rank in bytes, as counted by PyTorch's allocator."""
        return max(rank.allocated for rank in self.memory)

    @cached_property
    def peak_memory(self) -> float:
        """Bytes that the fullest rank needs."""
        return max(rank.total for rank in self.memory)

    def fits(self, limit: float | None = None) -> bool:
        """Whether every rank stays within `limit` bytes (default: the device's memory)."""
        return self.peak_memory <= (limit or self.hardware.memory)

    def is_tight(self, limit: float) -> bool:
        """Whether peak memory would exceed `limit` bytes if the prediction were too low by the largest known error."""
        return (1 + ERROR_BAND["memory"]) * self.peak_memory > limit

    @property
    def vocab_rows(self) -> tuple[int, ...] | None:
        """Vocabulary rows of every pipeline rank, summed over its tensor ranks; None if the vocabulary is not split."""
        return self.plan.rows_by_rank(self.job)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time for which each rank computes."""
        timeline = self.timeline
        more = self.job.microbatches - timeline.schedule.microbatches
        return tuple(own + more * each for own, each in zip(timeline.busy, added_busy(timeline), strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the time of the passes during which a rank is idle, averaged over ranks."""
        return 1 - self.seconds["work"] / (self.iteration_seconds - self.step)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """How the iteration's time is spent; the parts add up to the iteration time.

        work: mean work of the ranks.
        imbalance: excess of the busiest rank's work over the mean.
        bubble: time that the busiest rank would wait, for copies too, if communication were free.
        communication: time that communication adds.
        step: time after the passes.
        """
        costs = self.timeline.costs
        assert isinstance(costs, StageCosts)
        quiet = self.simulator.simulate(replace(costs, messages={}, collectives={}))
        mean, most = sum(self.busy) / len(self.busy), max(self.busy)
        silent = max(most, extended(quiet, self.job.microbatches))
        return {
            "work": mean,
            "imbalance": most - mean,
            "bubble": silent - most,
            "communication": max(0.0, self.iteration_seconds - self.step - silent),
            "step": self.step,
        }

    @cached_property
    def copies(self) -> tuple[RankCopies, ...]:
        """Copies between device and host, by pipeline rank; empty without offloading."""
        if not self.plan.offload_chunks:
            return ()
        timeline, schedule = self.timeline, self.timeline.schedule
        memory, taken = memory_model(self.job, self.plan, schedule, self.hardware), defaultdict[int, float](float)
        for (_, rank, chunk), took in copy_seconds(memory).items():
            if (rank, chunk) in schedule.offloaded:
                taken[rank] += schedule.microbatches * took
        return tuple(RankCopies(memory.host(rank), taken[rank] / busy) for rank, busy in enumerate(timeline.busy))

    def bound_by(self, limit: float) -> str:
        """The run's bottleneck, in one or two words; `compute` if all parts other than the work are small."""
        if not self.fits(limit):
            return "memory"
        name = max((each for each in self.seconds if each != "work"), key=self.seconds.__getitem__)
        if self.seconds[name] < SMALL * sum(self.seconds.values()):
            return "compute"
        return f"rank {self.busy.index(max(self.busy))}" if name == "imbalance" else name

    def document(self, limit: float) -> dict[str, Any]:
        """The prediction as a JSON document."""
        plan = self.plan
        return {
            "schedule": plan.schedule,
            "activation_limit": plan.activation_limit or None,
            "method": plan.method,
            "chunks": plan.chunks,
            "layers": plan.layers,
            "vocab_rows": self.vocab_rows,
            "offload_chunks": plan.offload_chunks,
            "iteration_seconds": self.iteration_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "seconds": self.seconds,
            "busy_seconds": self.busy,
            "peak_memory_bytes": self.peak_memory,
            "memory_bytes": [rank.parts() for rank in self.memory],
            "fits": self.fits(limit),
            "free_bytes": limit - self.peak_memory,
            "tight": self.is_tight(limit),
            "bound_by": self.bound_by(limit),
        } | ({"copies": list(map(asdict, self.copies))} if self.copies else {})


def predict(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    simulator: Simulator | None = None,
    sample: Job | None = None,
) -> Prediction:
    """Predict time and memory of `job` under `plan`.

    Args:
        simulator: a simulator of the schedule; by default, that of `make_simulator`.
        sample: the job with as many microbatches as are simulated, such as `sampled(job)`; by default, all of them.

    Raises UserError if the schedule is unknown or cannot run the job, or if the layers do not fit the schedule.
    """
    sample = sample or job
    simulator = simulator or make_simulator(sample, plan, hardware)
    schedule, memory = simulator.schedule, memory_model(sample, plan, simulator.schedule, hardware)
    timeline = simulator.simulate(stage_costs(sample, plan, schedule, hardware))
    step = after_passes(sample, plan, schedule, hardware)
    seconds, ranks = extended(timeline, job.microbatches) + step, tuple(map(memory.rank, range(job.pipeline)))
    return Prediction(job, plan, hardware, seconds, step, ranks, timeline, simulator)


def forward_only_seconds(job: Job, plan: Plan, hardware: Hardware) -> float:
    """Predict a call that computes no gradients, such as one for the log-probabilities of an old policy."""
    costs = order_costs(job, plan, hardware)
    schedule = schedule_of(replace(plan.request(job, costs=costs), forward_only=True))
    if plan.vocab is not VocabMethod.NONE:  # S computes no input gradient, as in vocab-1.
        plan = replace(plan, vocab=VocabMethod.VOCAB_1)
    plan = replace(plan, offload_chunks=0)
    return Simulator(schedule, costs).simulate(stage_costs(job, plan, schedule, hardware)).makespan


@gc_paused()
def evaluate(plan: Plan, job: Job, hardware: Hardware) -> Prediction:
    """Like `predict`, but if there are very many microbatches, only some of them are simulated; see `samples`."""
    return predict(job, plan, hardware, sample=sampled(job))


def memory_model(job: Job, plan: Plan, schedule: Schedule, hardware: Hardware) -> MemoryModel:
    """Return the memory model of the ranks that run `plan` in the order of `schedule`."""
    return MemoryModel(job, schedule, layers_of(job, plan, schedule.placement), hardware, plan.shard_rows(job))


def after_passes(job: Job, plan: Plan, schedule: Schedule, hardware: Hardware) -> float:
    """Seconds that gradient synchronisation and the optimizer take after the last pass, on the rank with the most
    parameters.
    """
    memory = memory_model(job, plan, schedule, hardware)
    fullest = max(range(job.pipeline), key=memory.parameters)
    experts = memory.expert_parameters(fullest)
    times = PassTimes(job, hardware)
    backward = forward = 0.0
    if job.data_overlap or job.gather_overlap:
        stages = stage_times(times, plan.vocab, memory.layers, schedule.split_backward)
        held = [stages[stage] for stage in schedule.placement.stage_of[fullest]]
        forward, backward = sum(stage.F for stage in held), sum(stage.B + stage.W for stage in held)
    narrow = memory.fp8_parameters(fullest)
    sync = times.gradient_sync(memory.parameters(fullest) - experts, experts, narrow, forward, backward)
    return sync + times.optimizer_step(memory.stepped_parameters(fullest), *memory.muon(fullest))


def make_simulator(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    further_orders: bool = True,
) -> Simulator:
    """Return a simulator of `plan`'s schedule, whose passes are ordered by the same costs as in training.

    `further_orders`: see `ScheduleRequest`. Raises UserError for plans that training refuses.
    """
    plan.check(job)
    costs = order_costs(job, plan, hardware)
    schedule = schedule_of(plan.request(job, costs=costs, further_orders=further_orders))
    return Simulator(schedule, costs, bool(plan.offload_chunks) and has_one_queue(job, hardware))


def has_one_queue(job: Job, hardware: Hardware) -> bool:
    """Whether copies and passes share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS is 1, or Megatron requires 1)."""
    demanded = hardware.needs_one_queue and max(job.tensor, job.context) > 1
    return hardware.is_gpu and (job.one_queue or demanded)
