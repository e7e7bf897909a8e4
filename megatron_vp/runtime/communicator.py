"""Collective operations of a pipeline's ranks, over NCCL or gloo.

Every member of a group calls the same operations in the same order. An operation blocks until this rank's part is done:
on CUDA it blocks the current stream, on CPU the calling thread. In this module, a rank is a position within a group,
and a group need not contain all ranks of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist


class Communicator:
    """Moves contiguous tensors between the ranks of one group. This class serves a rank without peers, whose tensors
    keep their contents.
    """

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's `tensor` into `tensor` on every rank."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `gathered` [ranks, ...] with every rank's `own` [...]."""
        gathered.copy_(own.expand_as(gathered))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Set the root's `tensor` to the sum over all ranks; on other ranks, its contents become undefined."""

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """Send `outgoing[r]` rows of `sent` to each rank r; fill `received` with `incoming[r]` rows from each rank r.

        The rows of both tensors are in rank order.
        """


class NativeCommunicator(Communicator):
    """Calls the backend's own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`."""
        dist.broadcast(tensor, group=self._group, group_src=root)

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """See `Communicator`."""
        dist.all_gather_into_tensor(gathered.flatten(0, 1), own, self._group)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`."""
        dist.reduce(tensor, group=self._group, group_dst=root)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """See `Communicator`.

        A rank sends one batch of messages, only to ranks that need its rows. An all-to-all would also send empty
        messages and thus connect all pairs of ranks. For each pair and direction, this would take 9 MiB of buffers per
        NCCL channel.
        """
        sends, receives = _rows_by_rank(sent, outgoing), _rows_by_rank(received, incoming)
        rank = self._group.rank()
        if rank in sends:
            receives[rank].copy_(sends[rank])
        batch = [
            dist.P2POp(start, tensor, group=self._group, group_peer=peer)
            for start, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if peer != rank
        ]
        # PyTorch rejects an empty batch.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()


def _rows_by_rank(tensor: torch.Tensor, counts: Sequence[int]) -> dict[int, torch.Tensor]:
    """Split a tensor with rows in rank order into one view per rank; leave out ranks without rows."""
    ends = accumulate(counts)
    return {
        rank: tensor[end - count : end] for rank, (count, end) in enumerate(zip(counts, ends, strict=True)) if count
    }


def communicator(group: dist.ProcessGroup) -> Communicator:
    """Return a communicator for the backend of `group`."""
    return Communicator() if dist.get_backend(group) == "fake" else NativeCommunicator(group)
