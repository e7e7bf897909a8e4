"""Process groups of one pipeline: one for the vocabulary collectives, one per directed edge and channel.

A communicator carries one kind of traffic in one order, so that no two logical messages can be paired wrongly and
none waits behind an unrelated one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_vp.runtime.communicator import Communicator, communicator
from megatron_vp.schedule.instructions import Channel

Edge = tuple[int, int, Channel]
"""A directed edge between two pipeline ranks, and what it carries."""

VOCABULARY_CTAS = 4
"""Thread blocks that NCCL may use for the vocabulary communicator: its collectives run beside transformer passes and
must leave them the multiprocessors. Not yet measured on a GPU."""


@dataclass(frozen=True)
class PipelineGroups:
    """The communicators of one pipeline, as seen from one of its ranks.

    `members` are the global ranks in pipeline order, `rank` is this process's position among them.
    """

    members: tuple[int, ...]
    rank: int
    vocabulary: Communicator
    edges: dict[Edge, dist.ProcessGroup]

    @classmethod
    def create(
        cls, pipelines: Sequence[Sequence[int]], edges: Iterable[Edge], timeout: timedelta | None = None
    ) -> PipelineGroups:
        """Create the groups of every pipeline of the job, and keep those of this rank's; collective over all ranks.

        Names of process groups count the groups created so far, so all ranks must create all groups in one order. For
        a rank that is no member that costs microseconds: nothing is communicated.

        Args:
            pipelines: of each pipeline the global ranks in pipeline order; the same on all ranks.
            edges: every directed edge that the schedules will use.
            timeout: of every operation; None keeps the backend's default.
        """
        edges = sorted(edges)
        mine = None
        for members in map(tuple, pipelines):
            vocabulary = dist.new_group(list(members), timeout, pg_options=_vocabulary_options())
            groups = {
                (source, target, channel): dist.new_group(
                    [members[source], members[target]], timeout, pg_options=_urgent_options()
                )
                for source, target, channel in edges
            }
            if dist.get_rank() in members:
                rank = members.index(dist.get_rank())
                own = {edge: group for edge, group in groups.items() if rank in edge[:2]}
                mine = cls(members, rank, communicator(vocabulary), own)
        assert mine is not None, f"rank {dist.get_rank()} is in none of the pipelines"
        return mine


def _urgent_options() -> object:
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _vocabulary_options() -> object:
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = VOCABULARY_CTAS
    return options


def pipeline_device() -> torch.device:
    """The device on which this process computes and communicates."""
    # The fake group of a rank without peers says nothing of the device.
    if dist.get_backend() == "nccl" or (dist.get_backend() == "fake" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
