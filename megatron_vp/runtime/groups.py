"""Creates a pipeline's process groups: one for the vocabulary collectives, and one for each kind of message on each
directed edge.

Each communicator carries one kind of traffic, in a fixed order. Therefore no send can match the wrong receive, and no
message waits behind an unrelated message.

With tensor parallelism, a model replica consists of t parallel pipelines of p ranks each, and the vocabulary is split
into p x t shards. Data that every rank needs in full (tokens, X, g) is sent within each pipeline. The t ranks of a
stage combine the statistics and partial sums of the t pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist

from megatron_vp.schedule.transfers import CHANNELS, Edge

CTAS = CHANNELS
"""Maximum number of thread blocks, and thus of multiprocessors, that NCCL may use for one of our operations. These
blocks occupy multiprocessors even while the operation waits for a peer. By default, NCCL would use up to 32 thread
blocks for a receive over NVLink, and the receives of all edges together would leave hardly any multiprocessors for the
passes. The effect of this limit has not yet been measured on a GPU.
"""
EDGE_CTAS = CTAS
"""Maximum number of thread blocks for a message between two ranks. A rank in the middle of the pipeline nearly always
waits for some message, so a smaller number might leave more multiprocessors for the passes.
"""


class Communicator:
    """Moves contiguous tensors between some or all ranks of a pipeline, over NCCL or gloo.

    Every member of `group` calls the same operations in the same order. An operation blocks until this rank's part is
    done: on CUDA it blocks the current stream, on CPU the calling thread. The methods take pipeline ranks.

    members: the global ranks of the pipeline, in pipeline order.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self._group, self._members = group, members

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's `tensor` into `tensor` on every rank."""
        dist.broadcast(tensor, self._members[root], self._group)

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `gathered` [group ranks, ...] with every rank's `own` [...]."""
        dist.all_gather_into_tensor(gathered.flatten(0, 1), own, self._group)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Set the root's `tensor` to the sum over all ranks; on other ranks, its contents become undefined."""
        dist.reduce(tensor, self._members[root], group=self._group)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """Send `outgoing[r]` rows of `sent` to each rank r; fill `received` with `incoming[r]` rows from each rank r.

        The rows of both tensors are in rank order. A rank sends one batch of messages, only to ranks that need its
        rows. An all-to-all would also send empty messages and thus connect all pairs of ranks. For each pair and
        direction, this would take 9 MiB of buffers per NCCL channel.
        """
        own = dist.get_rank()
        sends = dict(zip(self._members, sent.split(outgoing), strict=True))
        receives = dict(zip(self._members, received.split(incoming), strict=True))
        receives[own].copy_(sends[own])
        batch = [
            dist.P2POp(start, rows, peer, self._group)
            for start, by_peer in ((dist.irecv, receives), (dist.isend, sends))
            for peer, rows in by_peer.items()
            if len(rows) and peer != own
        ]
        # PyTorch rejects an empty batch.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()


@dataclass(frozen=True)
class PipelineGroups:
    """The communicators of one pipeline, as seen from one of its ranks.

    `members` are the global ranks in pipeline order, and `rank` is this process's position among them. `tensor_rank` is
    the position of the pipeline among the `tensor_size` pipelines of its replica. `vocabulary` connects the pipeline
    ranks listed in `vocab_members`, and is None on all other ranks. `tensor` connects the ranks of a stage, and is None
    if a replica has only one pipeline. `pipeline` connects all ranks of the pipeline, and `host` the processes of all
    ranks of the replica, without their devices, unless the job has no groups of gloo.
    """

    members: tuple[int, ...]
    rank: int
    tensor_size: int
    tensor_rank: int
    vocabulary: Communicator | None
    tensor: dist.ProcessGroup | None
    edges: dict[Edge, dist.ProcessGroup]
    vocab_members: tuple[int, ...]
    pipeline: dist.ProcessGroup
    host: Any = None

    @property
    def alone(self) -> bool:
        """Whether this rank has no peers, as in a replay (`megatron_vp.mcore.replay`)."""
        return dist.is_initialized() and dist.get_backend() == "fake"

    @classmethod
    def create(
        cls,
        replicas: Sequence[Sequence[int]],
        edges: Iterable[Edge],
        timeout: timedelta | None = None,
        tensor_size: int = 1,
        vocab_members: Sequence[int] | None = None,
        *,
        gloo: bool = True,
    ) -> PipelineGroups:
        """Create the groups of every pipeline of the job, and return this rank's groups. All ranks must call this.

        PyTorch names process groups by a counter, so all ranks must create all groups in the same order. Nothing is
        communicated here: NCCL creates a communicator when its group is first used, and blocks the host until the peers
        arrive. Lowered programs cannot deadlock even if hosts are blocked in this way
        (`megatron_vp.schedule.lowering`).

        Args:
            replicas: the global ranks of each model replica, ordered by pipeline rank, then by tensor rank.
            edges: every directed edge between pipeline ranks that the schedules will use.
            timeout: time limit of every operation; None keeps the backend's default.
            tensor_size: t, the number of parallel pipelines in a replica.
            vocab_members: pipeline ranks that take part in the vocabulary collectives; None means all.
            gloo: whether to create `host`. A group of gloo connects its members at once.
        """
        edges = sorted(edges)
        joined = tuple(vocab_members or range(len(replicas[0]) // tensor_size))
        mine = None

        def group(ranks: Sequence[int], ctas: int = CTAS) -> Any:  # On other ranks, `new_group` returns a placeholder.
            return dist.new_group(list(ranks), timeout, pg_options=_nccl_options(timeout, ctas))

        for replica in replicas:
            stages = list(batched(replica, tensor_size))
            backend = "gloo" if dist.get_backend() == "nccl" else None
            host: Any = dist.new_group(list(replica), timeout, backend=backend) if gloo else None
            tensor = [group(stage) if tensor_size > 1 else None for stage in stages]
            for tensor_rank, members in enumerate(zip(*stages, strict=True)):
                pipeline = vocabulary = group(members)
                if len(joined) < len(members):
                    vocabulary = group([members[each] for each in joined])
                groups = {edge: group([members[edge[0]], members[edge[1]]], EDGE_CTAS) for edge in edges}
                if dist.get_rank() in members:
                    rank = members.index(dist.get_rank())
                    own = {edge: each for edge, each in groups.items() if rank in edge[:2]}
                    part = Communicator(vocabulary, members) if rank in joined else None
                    mine = cls(members, rank, tensor_size, tensor_rank, part, tensor[rank], own, joined, pipeline, host)
        assert mine is not None, f"rank {dist.get_rank()} belongs to none of the model replicas"
        return mine


def _nccl_options(timeout: timedelta | None, ctas: int) -> object:
    """NCCL options for a high-priority stream and few thread blocks; None for other backends.

    Megatron's groups use PyTorch's 32 normal-priority streams in turn. If an exchange of embedding rows ran on the
    stream of a Megatron group, it could wait for an operation of that group while other ranks of the group wait for the
    exchange.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ctas
    if hasattr(options, "lazy_init"):
        # By default, PyTorch 2.15 creates a communicator together with its group, in a collective over all ranks of the
        # job. With `lazy_init`, only the members create it, at the group's first use, as in older releases.
        options.lazy_init = True
    if timeout is not None:
        options._timeout = timeout  # `new_group` warns if this differs from its `timeout` argument.
    return options


def from_all(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one object from each rank of `group`, by default from all ranks of the job."""
    given = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, own, group=group)
    return given


def pipeline_device() -> torch.device:
    """The device on which this process computes and communicates."""
    # The fake process group of a rank without peers works with any device, so use a GPU if one is available.
    if dist.get_backend() == "nccl" or (dist.get_backend() == "fake" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
