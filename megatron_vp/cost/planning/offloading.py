"""Fits runs to memory: by offloading chunks to host memory, and by shaping flexible schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_vp.cost.hardware.gpus import GIB, Hardware
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.predict import Prediction, evaluate, predict
from megatron_vp.cost.planning.stage_costs import layers_of, order_costs, single_microbatch, stage_costs
from megatron_vp.cost.ranks.outside import FRAGMENTS
from megatron_vp.cost.ranks.rank_memory import MemoryModel
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.schedule import Costs, family
from megatron_vp.schedule.flex import fitted, microbatches_of_limit
from megatron_vp.schedule.ledger import peak
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.placed_copies import check_offloaded
from megatron_vp.schedule.request import AUTO

HOST_SHARE = 0.8
"""Share of a node's host memory that activations may use; the rest is for processes, data and checkpoint writing."""

MOST_LOAD = 0.9
"""Largest ratio of a rank's copy time to its pass time that `plan` allows; above it, passes would wait for copies."""

STEPS = 3
"""Number of memory limits that `fitted_evaluation` tries. The first is only an estimate, and each further one is lower
by one chunk's activations.
"""

FITTED_PER_RANK = 3
"""When `plan` searches for a flexible schedule's shape, it uses at most this many microbatches per pipeline rank. A
training job searches with all its microbatches and may find a different shape.
"""


def offloaded(plan: Plan, job: Job, hardware: Hardware) -> list[Plan]:
    """The plan with every number of offloaded chunks that MOST_LOAD allows."""
    counts = range(1, family(plan.schedule).chunks_of(plan.chunks) + 1)
    return [
        replace(plan, offload_chunks=count)
        for count in (counts if job.pipeline > 1 else ())
        if copy_load(job, plan, count, hardware) <= MOST_LOAD
    ]


def fits_host(found: Prediction) -> bool:
    """Whether a run that shall offload chunks does so, with no more host memory than `host_room`."""
    if not found.copies:
        return True
    return (
        0 < fullest_node(found.job, found.hardware, [rank.host for rank in found.copies]) <= host_room(found.hardware)
    )


def with_chosen_offload(
    config: JobConfig, plan: Plan, job: Job, hardware: Hardware, limit: float | None = None
) -> Plan:
    """Choose the number of offloaded chunks of a configuration's `plan` if `--offload-chunks` is `auto`.

    The number is 0 if the plan fits into `limit` bytes per rank (None: the device's memory) without offloading;
    otherwise, it is the number that makes the plan fastest within the limit. Raises UserError if nothing fits.
    """
    if config.get("offload_chunks") != AUTO:
        return plan
    room = hardware.memory if limit is None else limit
    base = evaluate(plan, job, hardware)
    if base.fits(room):
        return plan
    found = [evaluate(each, job, hardware) for each in offloaded(plan, job, hardware)]
    found = list(filter(fits_host, found))
    fitting = [each for each in found if each.fits(room)]
    if not fitting:
        least = min((base, *found), key=lambda each: each.peak_memory)
        raise UserError(
            f"--offload-chunks auto finds no number of chunks with which this job fits into {room / GIB:.4g} GiB per "
            f"rank: it needs at least {least.peak_memory / GIB:.1f} GiB, with {least.plan.offload_chunks} "
            "chunks offloaded; use another --pipeline-schedule or more ranks, or try megatron-vp plan --offload"
        )
    return min(fitting, key=lambda each: each.iteration_seconds).plan


def copy_load(job: Job, plan: Plan, chunks: int, hardware: Hardware) -> float:
    """The largest ratio of a rank's copy time to its pass time. Each rank offloads the `chunks` chunks that take
    longest to copy.
    """
    single = single_microbatch(plan, job)
    costs = stage_costs(job, replace(plan, offload_chunks=chunks), single, hardware)
    loads = []
    for rank, order in enumerate(single.ranks):
        work = sum(costs.duration(single, rank, step) for step in order)
        both = [costs.copies[True, rank, chunk] + costs.copies[False, rank, chunk] for chunk in range(single.chunks)]
        loads.append(sum(sorted(both)[single.chunks - chunks :]) / work)
    return max(loads)


def fitted_evaluation(plan: Plan, largest: Prediction, limit: float) -> list[Prediction]:
    """Fit the flexible schedule of `plan` to `limit` bytes per rank, and evaluate it. Return nothing if no shape fits.

    `largest` is a run of its largest base, which does not fit.
    """
    job, hardware = largest.job, largest.hardware
    sample = replace(job, microbatches=min(job.microbatches, FITTED_PER_RANK * job.pipeline))
    # Whatever a rank needs too much must come from its activations, which take their fragments with them.
    room = min(rank.activations - (rank.total - limit) / (1 + FRAGMENTS) for rank in largest.memory)
    chunks = family(plan.schedule).chunks_of(None)
    first = math.floor(chunks * room / largest_microbatch(job, largest.plan, hardware))
    try:
        request = plan.request(sample, costs=order_costs(sample, plan, hardware))
        for count in range(first, max(0, first - STEPS), -1):
            shape, text = fitted(request, count / chunks).shape, f"{count / chunks:g}"
            found = evaluate(replace(plan, shape=shape, activation_limit=text), job, hardware)
            if found.fits(limit):
                return [found]
    except UserError:
        pass
    return []


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


def largest_microbatch(job: Job, plan: Plan, hardware: Hardware) -> float:
    """Bytes of a microbatch's activations on the rank where they take the most memory."""
    schedule = plan.request(job, microbatches=min(job.microbatches, 2 * job.pipeline)).schedule()
    model = MemoryModel(job, schedule, layers_of(job, plan, schedule.placement), hardware)
    held = [peak(order, Held.ACTIVATIONS) / schedule.chunks for order in schedule.ranks]
    return max(model.rank(rank).activations / level for rank, level in enumerate(held))


def host_room(hardware: Hardware) -> float:
    """Bytes of a node's host memory that offloaded activations may use."""
    return HOST_SHARE * hardware.host.memory * hardware.gpus_per_node


def fullest_node(job: Job, hardware: Hardware, host: Sequence[float]) -> float:
    """Bytes of host memory that the fullest node needs; `host[r]`: bytes that each GPU of pipeline rank r needs.

    The ranks of a stage have consecutive numbers.
    """
    each, size = job.gpus_per_stage, hardware.gpus_per_node
    if each % size == 0:
        return size * max(host)
    nodes = -(-job.gpus // size)
    return max(
        sum(host[place // each] for place in range(node * size, min((node + 1) * size, job.gpus)))
        for node in range(nodes)
    )


def check_offload(found: Prediction) -> None:
    """Raise UserError if no activations are offloaded, or if a node has too little memory for them."""
    check_offloaded(found.timeline.schedule)
    asked = fullest_node(found.job, found.hardware, [rank.host for rank in found.copies])
    room = host_room(found.hardware)
    if asked > room:
        raise UserError(
            f"--offload-chunks {found.plan.offload_chunks} needs {asked / GIB:.0f} GiB of host memory per node, but "
            f"activations may use only {room / GIB:.0f} GiB ({100 * HOST_SHARE:.0f} % of it): offload fewer chunks, or "
            "leave --offload-chunks out"
        )
