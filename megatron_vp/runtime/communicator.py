"""The collective operations of a pipeline's ranks, with one interface for NCCL and gloo.

Every member calls the same operations in the same order. They block until this rank's part is done: on CUDA the
current stream, on CPU the calling thread. Ranks are positions among the members, which may be some of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist


class Communicator(Protocol):
    """Moves contiguous tensors between the ranks of one group."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill `tensor` on every rank with the root's."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `gathered` [ranks, ...] with every rank's `own` [...]."""

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Make the root's `tensor` the sum over all ranks; on other ranks its contents are undefined afterwards."""

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """Send `outgoing[r]` rows of `sent` to every rank r, and fill `received` with `incoming[r]` rows from it.

        Both lie in rank order; the counts are known on both sides.
        """


class NativeCommunicator:
    """The backend's own collectives."""

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

        Messages between the pairs that have rows, in one batch. An all-to-all sends to every rank, empty or not, and so
        connects all pairs: 9 MiB of buffers for each pair, direction and channel.
        """
        sends, receives = _rows_by_rank(sent, outgoing), _rows_by_rank(received, incoming)
        rank = self._group.rank()
        if rank in sends:
            receives.pop(rank).copy_(sends.pop(rank))
        parts = [(dist.irecv, receives), (dist.isend, sends)]
        batch = [
            dist.P2POp(start, rows, group=self._group, group_peer=peer)
            for start, by_peer in parts
            for peer, rows in by_peer.items()
        ]
        # It runs on the backend's own stream; waiting orders this one behind it. An empty batch is an error.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()


class MessageCommunicator:
    """Messages between ranks with data for each other, through the root if there is one.

    For gloo, whose collectives of small tensors take more messages and more steps.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`."""
        if self._rank == root:
            self._transfer(sends=dict.fromkeys(range(self._size), tensor), receives={})
        else:
            self._transfer(sends={}, receives={root: tensor})

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """See `Communicator`."""
        self._gather(gathered, own, root=0)
        self.broadcast(gathered, root=0)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`. Adds in rank order."""
        parts = tensor.new_empty((self._size if self._rank == root else 0, *tensor.shape))
        self._gather(parts, tensor, root)
        if self._rank == root:
            torch.sum(parts, 0, out=tensor)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """See `Communicator`."""
        sends, receives = _rows_by_rank(sent, outgoing), _rows_by_rank(received, incoming)
        if self._rank in sends:
            receives[self._rank].copy_(sends[self._rank])
        self._transfer(sends, receives)

    def _gather(self, parts: torch.Tensor, own: torch.Tensor, root: int) -> None:
        if self._rank == root:
            parts[root].copy_(own)
            self._transfer(sends={}, receives=dict(enumerate(parts)))
        else:
            self._transfer(sends={root: own}, receives={})

    def _transfer(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send and receive messages by rank, without this rank's own. All are started before any is waited for."""
        works = [
            start(tensor, group=self._group, **{peer: rank})
            for start, peer, tensors in ((dist.irecv, "group_src", receives), (dist.isend, "group_dst", sends))
            for rank, tensor in tensors.items()
            if rank != self._rank
        ]
        for work in works:
            assert work is not None  # this rank is a member
            work.wait()


def _rows_by_rank(tensor: torch.Tensor, counts: Sequence[int]) -> dict[int, torch.Tensor]:
    """The rows of every rank that has some; they lie in rank order."""
    ends = accumulate(counts)
    return {
        rank: tensor[end - count : end] for rank, (count, end) in enumerate(zip(counts, ends, strict=True)) if count
    }


class LoneCommunicator:
    """For a rank without peers: every buffer keeps its made-up contents."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Nothing arrives."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """All ranks have the same tensor."""
        gathered.copy_(own.expand_as(gathered))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """There are no other ranks to add to."""

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """Nothing arrives."""


_BY_BACKEND: dict[str, Callable[[dist.ProcessGroup], Communicator]] = {
    "gloo": MessageCommunicator,
    "fake": lambda group: LoneCommunicator(),
}


def communicator(group: dist.ProcessGroup) -> Communicator:
    """The communicator that suits the backend of `group`."""
    return _BY_BACKEND.get(dist.get_backend(group), NativeCommunicator)(group)
