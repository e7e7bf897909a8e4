"""Point-to-point links: activations forward, gradients backward, each directed edge on a communicator of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.schedule.transfers import Message


class Links:
    """The messages of one iteration, seen from one rank.

    A sent tensor is kept alive until its send is known to be complete: gloo's send is a rendezvous, and NCCL's reads
    the buffer when the peer is ready. Nothing ever blocks on a send inside the schedule. With gloo, completion is known
    only at the end.
    """

    def __init__(self, groups: PipelineGroups) -> None:
        self._groups = groups
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self._receiving: dict[Message, tuple[dist.Work, torch.Tensor]] = {}

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending a contiguous tensor."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        work = dist.isend(tensor, self._groups.members[message.target], group=self._group(message))
        assert work is not None  # this rank is a member
        if not self._groups.alone:  # a send without a receiver would never complete
            self._sending.append((work, tensor))

    def receive(self, message: Message, buffer: torch.Tensor) -> None:
        """Start receiving into `buffer`."""
        work = dist.irecv(buffer, self._groups.members[message.source], group=self._group(message))
        assert work is not None
        self._receiving[message] = (work, buffer)

    def wait(self, message: Message) -> torch.Tensor:
        """Return the received tensor; compute work issued later sees it complete."""
        work, buffer = self._receiving.pop(message)
        work.wait()
        return buffer

    def finish(self) -> None:
        """Wait for all sends of the iteration: every peer has posted its receives by then."""
        assert not self._receiving, f"received but never used: {[str(message) for message in self._receiving]}"
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _group(self, message: Message) -> dist.ProcessGroup:
        return self._groups.edges[(message.source, message.target, message.channel)]
