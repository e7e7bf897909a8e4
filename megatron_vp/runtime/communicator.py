"""Collective operations of a pipeline's ranks, with one interface for NCCL and gloo.

Every member of a group calls the same operations in the same order. An operation blocks until this rank's part is done:
on CUDA it blocks the current stream, on CPU the calling thread. In this module, a rank is a position within a group,
and a group need not contain all ranks of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._transfer(sends, receives)

    def _transfer(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send and receive tensors, which are keyed by peer, and wait for them; skip entries for this rank."""
        batch = [
            dist.P2POp(start, tensor, group=self._group, group_peer=peer)
            for start, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if peer != self._group.rank()
        ]
        # PyTorch rejects an empty batch.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()


class MessageCommunicator(NativeCommunicator):
    """Implements `Communicator` for gloo with point-to-point messages, because gloo's own collectives send more
    messages for small tensors.
    """

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`."""
        if self._group.rank() == root:
            self._transfer(sends=dict.fromkeys(range(self._group.size()), tensor), receives={})
        else:
            self._transfer(sends={}, receives={root: tensor})

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """See `Communicator`."""
        self._gather(gathered, own, root=0)
        self.broadcast(gathered, root=0)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`; the sum is computed in rank order."""
        is_root = self._group.rank() == root
        parts = tensor.new_empty((self._group.size() if is_root else 0, *tensor.shape))
        self._gather(parts, tensor, root)
        if is_root:
            torch.sum(parts, 0, out=tensor)

    def _transfer(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        works = [
            start(tensor, group=self._group, **{peer: rank})
            for start, peer, tensors in ((dist.irecv, "group_src", receives), (dist.isend, "group_dst", sends))
            for rank, tensor in tensors.items()
            if rank != self._group.rank()
        ]
        for work in works:
            assert work is not None  # `work` is None only on ranks outside the group.
            work.wait()

    def _gather(self, parts: torch.Tensor, own: torch.Tensor, root: int) -> None:
        if self._group.rank() == root:
            parts[root].copy_(own)
            self._transfer(sends={}, receives=dict(enumerate(parts)))
        else:
            self._transfer(sends={root: own}, receives={})


def _rows_by_rank(tensor: torch.Tensor, counts: Sequence[int]) -> dict[int, torch.Tensor]:
    """Split a tensor with rows in rank order into one view per rank; leave out ranks without rows."""
    ends = accumulate(counts)
    return {
        rank: tensor[end - count : end] for rank, (count, end) in enumerate(zip(counts, ends, strict=True)) if count
    }


def communicator(group: dist.ProcessGroup) -> Communicator:
    """Return a communicator for the backend of `group`."""
    backend = dist.get_backend(group)
    if backend == "fake":
        return Communicator()
    return MessageCommunicator(group) if backend == "gloo" else NativeCommunicator(group)
