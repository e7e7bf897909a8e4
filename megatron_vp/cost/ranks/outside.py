"""Memory that PyTorch's allocator does not count: the CUDA context, kernels, communicators and fragmentation.

The figures are estimates from the source code of NCCL 2.30 and from experience with PyTorch 2.15, not measurements. On
a GPU, the sum of all figures except fragmentation corresponds to `total - free - torch.cuda.memory_reserved()`, where
`free, total = torch.cuda.mem_get_info()`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.schedule import FAMILIES, Schedule, VocabMethod
from megatron_vp.schedule.transfers import CHANNELS, Edge, all_edges

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


@dataclass(frozen=True)
class OutsideMemory:
    """Memory of one rank that PyTorch's allocator does not count, in bytes.

    edges: communicators for activations and gradients between stages.
    vocabulary: communicators for collectives over the pipeline and over a stage's tensor ranks.
    rows: connections over which embedding rows are sent.
    megatron: communicators of Megatron's own process groups.
    communicators: number of communicators that this project creates, not their bytes.
    """

    context: float
    kernels: float
    edges: float
    vocabulary: float
    rows: float
    megatron: float
    fragments: float
    communicators: int

    @property
    def total(self) -> float:
        """Sum of all parts in bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "communicators"}


def runs_megatrons_schedule(schedule: Schedule) -> bool:
    """Whether Megatron's own loop runs `schedule`; if so, this project creates no communicators."""
    megatrons = schedule.name in FAMILIES and FAMILIES[schedule.name].in_megatron
    return schedule.vocab is VocabMethod.NONE and megatrons and not schedule.offloaded


def outside_memory(job: Job, schedule: Schedule, rank: int, moving: float, hardware: Hardware) -> OutsideMemory:
    """Memory of a pipeline rank outside its tensors; `moving`: bytes that are repeatedly allocated and freed."""
    fragments = FRAGMENTS * moving
    own: list[Edge] = []
    ring = tensor = rows = 0
    if not runs_megatrons_schedule(schedule):
        placement, sharded = schedule.placement, schedule.vocab is not VocabMethod.NONE
        own = sorted(edge for edge in all_edges(placement, sharded) if rank in edge[:2])
        members, first = placement.vocab_members(schedule.vocab_ranks), placement.first_rank
        if rank in members:
            ring, tensor = len(members), job.tensor
        if sharded:  # The rank of the first stage exchanges embedding rows with every rank that holds some.
            others = {*schedule.vocab_ranks} - {first}
            rows = len(others) if rank == first else rank in others
    count = len(own) + (ring > 1) + (tensor > 1)
    if not hardware.is_gpu:
        # Gloo needs no buffers in addition to the messages.
        return OutsideMemory(CONTEXT, 0.0, 0.0, 0.0, 0.0, 0.0, fragments, count)
    return OutsideMemory(
        context=CONTEXT,
        kernels=KERNELS,
        edges=sum(COMMUNICATOR + _ends(edge, rank, job, hardware) * CHANNELS * CONNECTION for edge in own),
        vocabulary=_ring(ring, CHANNELS) + _ring(tensor, CHANNELS),
        rows=rows * CHANNELS * CONNECTION,
        megatron=_megatron(job, schedule, rank),
        fragments=fragments,
        communicators=count,
    )


def _ends(edge: Edge, rank: int, job: Job, hardware: Hardware) -> int:
    """Number of buffer sets on `rank` for an edge: 0 if the rank sends within its own node, otherwise 1."""
    source, target, _ = edge
    node = [place * job.gpus_per_stage // hardware.gpus_per_node for place in (source, target)]
    return int(rank == target or node[0] != node[1])


def _ring(ranks: int, channels: int) -> float:
    """Bytes per rank of a ring communicator, which connects each rank to its two neighbours; 0 for a single rank."""
    return COMMUNICATOR + 2 * channels * CONNECTION if ranks > 1 else 0.0


def _megatron(job: Job, schedule: Schedule, rank: int) -> float:
    """Bytes of the communicators of Megatron's process groups on a rank.

    There is one group of all ranks (for barriers), one of a model replica (for the gradient norm), and one for each
    kind of parallelism. If Megatron's own schedule runs, the pipeline group also needs connections for messages between
    neighbouring stages.
    """
    placement = schedule.placement
    groups = [job.gpus, job.pipeline * job.tensor, job.data * job.context, job.tensor, job.context, job.expert]
    ends = (placement.first_rank, placement.last_rank)
    whole = schedule.vocab is VocabMethod.NONE
    if whole and job.model.tied and ends[0] != ends[1] and rank in ends:
        groups.append(2)
    found = sum(_ring(ranks, MEGATRON_CHANNELS) for ranks in groups)
    if runs_megatrons_schedule(schedule):
        stages = placement.stage_of[rank]
        near = {placement.rank_of(s + step) for s in stages for step in (-1, 1) if 0 <= s + step < placement.stages}
        found += len(near - {rank}) * MEGATRON_CHANNELS * CONNECTION
    return found
