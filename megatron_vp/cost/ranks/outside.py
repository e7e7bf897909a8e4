"""Memory that PyTorch's allocator does not count: the CUDA context, kernels, communicators and fragmentation.

The figures are estimates from the source code of NCCL 2.30 and from experience with PyTorch 2.15, not measurements.
"""

from __future__ import annotations

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.schedule import FAMILIES, Schedule, VocabMethod
from megatron_vp.schedule.transfers import CHANNELS, all_edges

MIB, GIB = 2**20, 2**30

CONTEXT = 0.5 * GIB
"""Bytes of the CUDA context or, on a CPU, of the process and its libraries."""

KERNELS = 0.35 * GIB
"""Bytes of loaded kernel code, and of workspaces that libraries allocate themselves."""

CONNECTION = 9.2 * MIB
"""Buffer bytes per connection and channel, by NCCL protocol: SIMPLE 4.0 MiB + LL 0.5 MiB + LL128 4.7 MiB."""

COMMUNICATOR = 4 * MIB
"""Bytes of a communicator's queues, and of its tables of peers and channels. Its connections are counted separately."""

MEGATRON_CHANNELS = 16
"""Channels that NCCL chooses for each of Megatron's communicators over NVLink; it chooses fewer between nodes."""

FRAGMENTS = 0.02
"""Fragmentation: memory that PyTorch reserves but cannot use, as a fraction of the memory that is repeatedly allocated
and freed, which excludes parameters, gradients and optimizer states.
"""


def runs_megatrons_schedule(schedule: Schedule) -> bool:
    """Whether Megatron's own loop runs `schedule`; if so, this project creates no communicators."""
    megatrons = schedule.name in FAMILIES and FAMILIES[schedule.name].in_megatron
    return schedule.vocab is VocabMethod.NONE and megatrons and not schedule.offloaded


def outside_memory(job: Job, schedule: Schedule, rank: int, hardware: Hardware) -> float:
    """Bytes on a pipeline rank that PyTorch does not allocate, without fragments.

    On a GPU, this corresponds to `total - free - torch.cuda.memory_reserved()`, where `free, total` are
    `torch.cuda.mem_get_info()`. On a CPU, Gloo needs no buffers in addition to the messages.
    """
    if not hardware.is_gpu:
        return CONTEXT
    placement, whole = schedule.placement, schedule.vocab is VocabMethod.NONE
    ends = placement.first_rank, placement.last_rank
    # Megatron's groups: all ranks (for barriers), a model replica (for the gradient norm), each kind of parallelism.
    groups = [job.gpus, job.pipeline * job.tensor, job.data * job.context, job.tensor, job.context, job.expert]
    if whole and job.model.tied and ends[0] != ends[1] and rank in ends:
        groups.append(2)
    found = CONTEXT + KERNELS + sum(_ring(ranks, MEGATRON_CHANNELS) for ranks in groups)
    if runs_megatrons_schedule(schedule):  # Megatron's pipeline group also connects neighbouring stages.
        stages = placement.stage_of[rank]
        near = {placement.rank_of(s + step) for s in stages for step in (-1, 1) if 0 <= s + step < placement.stages}
        return found + len(near - {rank}) * MEGATRON_CHANNELS * CONNECTION
    for source, target, _ in all_edges(placement, not whole):
        if rank in (source, target):
            # A rank that sends within its own node needs no buffers.
            node = [place * job.gpus_per_stage // hardware.gpus_per_node for place in (source, target)]
            found += COMMUNICATOR + (rank == target or node[0] != node[1]) * CHANNELS * CONNECTION
    members = placement.vocab_members(schedule.vocab_ranks)
    if rank in members:
        found += _ring(len(members), CHANNELS) + _ring(job.tensor, CHANNELS)
    if not whole:  # The rank of the first stage exchanges embedding rows with every rank that holds some.
        others = {*schedule.vocab_ranks} - {ends[0]}
        found += (len(others) if rank == ends[0] else rank in others) * CHANNELS * CONNECTION
    return found


def _ring(ranks: int, channels: int) -> float:
    """Bytes per rank of a ring communicator, which connects each rank to its two neighbours; 0 for a single rank."""
    return COMMUNICATOR + 2 * channels * CONNECTION if ranks > 1 else 0.0
