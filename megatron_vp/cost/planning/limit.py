"""Fits a plan's flexible schedule to `--activation-limit`, which may be given in GiB."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.predict import Prediction, predict
from megatron_vp.cost.planning.stage_costs import layers_of, order_costs
from megatron_vp.cost.ranks.rank_memory import MemoryModel
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.schedule import Costs
from megatron_vp.schedule.flex import fitted, microbatches_of_limit
from megatron_vp.schedule.ledger import peak
from megatron_vp.schedule.pass_kinds import Held

GIB = 2**30


def with_limit(job: Job, plan: Plan, hardware: Hardware, limit: str, costs: Costs | None = None) -> Plan:
    """Fit the shape of `plan`'s flexible schedule to `limit`: activations per rank, in microbatches or in GiB.

    The order of the passes follows from `costs`. If `costs` is None, `order_costs` computes them. Of the shape that
    `fitted` finds and of the bases that fit, the plan gets the one that is predicted to be fastest. Raises UserError if
    none fits and `fitted` does, or if the limit is less than the activations of one chunk.
    """
    request = plan.request(job, costs=order_costs(job, plan, hardware) if costs is None else costs)
    text = limit.strip()
    in_bytes = text.endswith("GiB")
    room = microbatches_of_limit(text.removesuffix("GiB"), "GiB" if in_bytes else "microbatches")
    microbatches = room * GIB / largest_microbatch(job, plan, hardware) if in_bytes else room
    if in_bytes and microbatches * request.chunks < 1:
        raise UserError(
            f"--activation-limit {limit} is too small: one chunk's activations alone take "
            f"{room / microbatches / request.chunks:.3g} GiB; give at least that much"
        )

    def fits(found: Prediction) -> bool:
        if in_bytes:
            return max(rank.activations for rank in found.memory) <= room * GIB
        return max(found.timeline.peak_activation) <= room + 1e-9

    plans = [replace(plan, shape=base.name, activation_limit=text) for base in request.family.bases]
    found = [each for each in (predict(job, own, hardware) for own in plans) if fits(each)]
    try:
        shape = fitted(request, math.floor(microbatches * request.chunks + 1e-9) / request.chunks).shape
        found.insert(0, predict(job, replace(plan, shape=shape, activation_limit=text), hardware))
    except UserError:
        if not found:
            raise
    return min(found, key=lambda each: each.timeline.makespan).plan


def with_given_limit(config: JobConfig, plan: Plan, job: Job, hardware: Hardware) -> Plan:
    """Fit a configuration's `plan` to its `--activation-limit`, if given. Raises UserError if `with_limit` does."""
    limit = config.values.get("activation_limit")
    return plan if limit is None else with_limit(job, plan, hardware, str(limit))


def largest_microbatch(job: Job, plan: Plan, hardware: Hardware) -> float:
    """Bytes of a microbatch's activations on the rank where they take the most memory."""
    schedule = plan.request(job, microbatches=min(job.microbatches, 2 * job.pipeline)).schedule()
    model = MemoryModel(job, schedule, layers_of(job, plan, schedule.placement), hardware)
    held = [peak(order, Held.ACTIVATIONS) / schedule.chunks for order in schedule.ranks]
    return max(model.rank(rank).activations / level for rank, level in enumerate(held))
