"""Predicts a plan's time, MFU, bubble and memory by simulating its real schedule with modelled or measured costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.flops import model_flops
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.stage_costs import layers_of, order_costs, stage_costs, stage_times
from megatron_vp.cost.ranks.communication import CommunicationModel
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.cost.ranks.rank_memory import MemoryModel, RankMemory
from megatron_vp.schedule import (
    PassCosts,
    Schedule,
    ScheduleRequest,
    Simulator,
    StageCosts,
    Timeline,
)


@dataclass(frozen=True)
class Prediction:
    """The prediction for `plan` of `job` on `hardware`, with times in seconds and memory in bytes."""

    job: Job
    plan: Plan
    hardware: Hardware
    timeline: Timeline
    iteration_seconds: float
    memory: tuple[RankMemory, ...]

    @property
    def mfu(self) -> float:
        """Model FLOP/s per GPU, counted as in Megatron, as a share of the hardware's nominal peak."""
        return model_flops(self.job) / self.job.gpus / self.iteration_seconds / self.hardware.peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of the whole job."""
        job = self.job
        return job.sequence * job.micro_batch * job.microbatches * job.data / self.iteration_seconds

    @cached_property
    def peak_memory(self) -> float:
        """The largest peak of any rank in bytes, as counted by PyTorch's allocator."""
        return max(rank.allocated for rank in self.memory)

    def fits(self, limit: float | None = None) -> bool:
        """Whether every rank's total memory stays within `limit` bytes (default: the device's memory)."""
        return max(rank.total for rank in self.memory) <= (limit or self.hardware.memory)


def predict(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    measured: PassCosts | StageCosts | None = None,
    simulator: Simulator | None = None,
) -> Prediction:
    """Predict time and memory of `job` under `plan`.

    Args:
        measured: pass times in seconds from the trace of a run, which replace the modelled times.
        simulator: a simulator of the schedule; by default, that of `make_simulator`.

    Raises UserError if the schedule is unknown or cannot run the job, or if the layers do not fit the schedule.
    """
    simulator = simulator or make_simulator(job, plan, hardware)
    costs = measured or stage_costs(job, plan, simulator.schedule, hardware)
    timeline = simulator.simulate(costs)
    memory = memory_model(job, plan, simulator.schedule, hardware)
    ranks = tuple(map(memory.rank, range(job.pipeline)))
    after = after_passes(job, plan, simulator.schedule, hardware)
    return Prediction(job, plan, hardware, timeline, timeline.makespan + after, ranks)


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
    times, communication = PassTimes(job, hardware), CommunicationModel(job, hardware)
    backward = forward = 0.0
    if job.data_overlap or job.gather_overlap:
        stages = stage_times(times, plan.vocab, memory.layers, schedule.split_backward)
        held = [stages[stage] for stage in schedule.placement.stage_of[fullest]]
        forward, backward = sum(stage.F for stage in held), sum(stage.B + stage.W for stage in held)
    narrow = memory.fp8_parameters(fullest)
    sync = communication.gradient_sync(memory.parameters(fullest) - experts, experts, narrow, forward, backward)
    return sync + times.optimizer_step(memory.stepped_parameters(fullest), *memory.muon(fullest))


def make_simulator(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    further_orders: bool = True,
) -> Simulator:
    """Return a simulator of `plan`'s schedule, whose passes are ordered by the same costs as in training. Results are
    cached.

    `further_orders`: see `ScheduleRequest`. Raises UserError for plans that training refuses.
    """
    plan.check(job)
    costs = order_costs(job, plan, hardware)
    request = plan.request(job, costs=costs, further_orders=further_orders)
    return _simulator(request, bool(plan.offload_chunks) and has_one_queue(job, hardware))


def has_one_queue(job: Job, hardware: Hardware) -> bool:
    """Whether copies and passes share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS is 1, or Megatron requires 1)."""
    demanded = hardware.needs_one_queue and max(job.tensor, job.context) > 1
    return hardware.is_gpu and (job.one_queue or demanded)


@lru_cache(maxsize=8)
def _simulator(request: ScheduleRequest, one_queue: bool) -> Simulator:
    return Simulator(_schedule(request), request.costs, one_queue)


@lru_cache(maxsize=64)  # Schedules take much less memory than simulators, so more of them are cached.
def _schedule(request: ScheduleRequest) -> Schedule:
    return request.schedule()
