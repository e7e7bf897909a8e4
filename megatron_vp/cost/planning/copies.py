"""Predicts offloading: how long copies take, which passes wait for them, and how much host memory they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_vp.cost.hardware.gpus import GIB, Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.cost.planning.predict import Prediction, make_simulator, memory_model
from megatron_vp.cost.planning.stage_costs import copy_seconds
from megatron_vp.errors import UserError
from megatron_vp.schedule.placed_copies import check_offloaded

HOST_SHARE = 0.8
"""Share of a node's host memory that activations may use; the rest is for processes, data and checkpoint writing."""


@dataclass(frozen=True)
class RankCopies:
    """Seconds and bytes of the copies between device and host on one rank.

    chunks: the offloaded chunks; fewer than requested if activations would be needed before they are copied out.
    host: peak bytes in host memory.
    bytes: bytes copied per microbatch in one direction.
    load: ratio of copy time to computing time.
    wait_out, wait_back, wait_in_queue: seconds per iteration; see `Timeline.copy_waits`.
    """

    chunks: tuple[int, ...]
    host: float
    bytes: float
    load: float
    wait_out: float
    wait_back: float
    wait_in_queue: float


def copies_of(prediction: Prediction) -> tuple[RankCopies, ...]:
    """Time and volume of every rank's copies between device and host."""
    timeline, schedule = prediction.timeline, prediction.timeline.schedule
    memory = memory_model(prediction.job, prediction.plan, schedule, prediction.hardware)
    took, found = copy_seconds(memory), []
    for rank, waits in enumerate(timeline.copy_waits):
        chunks = tuple(chunk for where, chunk in schedule.offloaded if where == rank)
        lane = schedule.microbatches * sum(took[way, rank, chunk] for way in (True, False) for chunk in chunks)
        moved = memory.offloaded(rank)
        stages = schedule.placement.stage_of[rank]
        sizes = sum(moved[stages[chunk]] for chunk in chunks)
        found.append(RankCopies(chunks, memory.host(rank), sizes, lane / timeline.busy[rank], *waits))
    return tuple(found)


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


def check_offload(prediction: Prediction) -> None:
    """Raise UserError if no activations are offloaded or, with the number of chunks that fit, if a node has too little
    memory for them.
    """
    check_offloaded(prediction.timeline.schedule)
    job, plan, hardware = prediction.job, prediction.plan, prediction.hardware

    def needed(chunks: int) -> float:
        other = replace(plan, offload_chunks=chunks)
        schedule = prediction.timeline.schedule
        if chunks != plan.offload_chunks:
            schedule = make_simulator(job, other, hardware).schedule
        memory = memory_model(job, other, schedule, hardware)
        return fullest_node(job, hardware, list(map(memory.host, range(job.pipeline))))

    room, asked = host_room(hardware), needed(plan.offload_chunks)
    if asked <= room:
        return
    fits = next((chunks for chunks in range(plan.offload_chunks - 1, 0, -1) if needed(chunks) <= room), 0)
    least = (
        f"use --offload-chunks {fits}" if fits else "not even one chunk per rank fits, so leave --offload-chunks out"
    )
    raise UserError(
        f"--offload-chunks {plan.offload_chunks} needs {asked / GIB:.0f} GiB of host memory per node, but activations "
        f"may use only {room / GIB:.0f} of its {hardware.host.memory * hardware.gpus_per_node / GIB:.0f} GiB: {least}"
    )
