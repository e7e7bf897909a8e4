"""Computes lower bounds on a plan's time and memory before `balance.balanced` chooses its layers and rows."""

from __future__ import annotations

from megatron_vp.cost.balance.balanced import choices, least_of_all
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.memory.layer_memory import layer_memory
from megatron_vp.cost.memory.outside import FRAGMENTS
from megatron_vp.cost.memory.rank_memory import WORKSPACES, MemoryModel
from megatron_vp.cost.prediction.bounds import Bound, HeldBytes, bound, weight_bytes
from megatron_vp.cost.prediction.samples import sampled
from megatron_vp.cost.prediction.stage_costs import layers_of, single_microbatch
from megatron_vp.cost.sizes.shapes import Job, Plan
from megatron_vp.cost.times.pass_times import PassTimes


def balanced_bound(plan: Plan, job: Job, hardware: Hardware) -> Bound:
    """Lower bounds on time and memory that hold for every layout and row assignment that `balance.balanced` may choose.

    The bounds are means over the ranks, because the total work and memory do not depend on the choice. Raises UserError
    if the job cannot run under the plan.
    """
    seconds = least_of_all(job, plan, hardware)
    single, model = single_microbatch(plan, job), job.model
    rows = (model.vocab // job.tensor // job.pipeline,) * job.pipeline
    layers = layers_of(job, plan, single.placement)
    memory = MemoryModel(job, single, layers, hardware, rows)
    ranks = [memory.rank(rank) for rank in range(job.pipeline)]
    weights = sum(weight_bytes(memory, rank, own) for rank, own in enumerate(ranks)) / job.pipeline
    outside = min(own.outside.context + own.outside.kernels + own.outside.megatron for own in ranks)
    always = weights + (1 + FRAGMENTS) * WORKSPACES + outside
    simulated, byte_seconds = sampled(job).microbatches, 0.0
    if not model.pattern:
        times, kept = PassTimes(job, hardware), layer_memory(job, single.split_backward)
        forward, backward = (
            (1 - hardware.constants.idle_boost) * min(layer, wide)
            for layer, wide in zip(times.layer()[:2], times.plain_layer()[:2], strict=True)
        )
        held = [memory.held(rank, {"t": kept.kept}) for rank in range(job.pipeline)]
        least = min(each[stage] / layers[stage] for each in held for stage in each if layers[stage])
        # A layer keeps a microbatch's activations while all later layers run that microbatch's forward and backward.
        byte_seconds = least * (forward + backward) * model.layers * (model.layers + 1) / 2
        byte_seconds += model.layers * (forward * kept.forward + backward * kept.backward)
        byte_seconds *= (1 + FRAGMENTS) * simulated / job.pipeline
    idle = seconds * (1 - simulated / job.microbatches)
    return Bound(seconds, always, (HeldBytes(always, byte_seconds, idle),))


def bounds_of_choices(plan: Plan, job: Job, hardware: Hardware, limit: float) -> list[Bound]:
    """One `Bound` for each distribution of layers and rows that `balance.balanced` may choose for `plan` within `limit`
    bytes per rank.
    """
    return [bound(each, job, hardware) for each in choices(job, plan, hardware, limit)]
