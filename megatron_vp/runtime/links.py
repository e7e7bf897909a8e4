"""Point-to-point links between ranks, with a separate communicator for each directed edge and kind of message."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.schedule.transfers import Message


class Links:
    """The messages of one iteration, as seen from one rank.

    A sent tensor is kept alive until its send is known to be complete, because the backend can delay reading the tensor
    until the receiver is ready. The schedule itself never blocks on a send. With gloo, sends are known to be complete
    only at the end of the iteration.
    """

    def __init__(self, groups: PipelineGroups) -> None:
        self._groups = groups
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self._receiving: dict[Message, tuple[dist.Work, torch.Tensor]] = {}

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending a contiguous tensor."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        work = dist.isend(tensor, self._groups.members[message.target], group=self._group(message))
        assert work is not None  # `work` is None only on ranks outside the group.
        if not self._groups.alone:  # A send without a receiver would never complete.
            self._sending.append((work, tensor))

    def receive(self, message: Message, buffer: torch.Tensor) -> None:
        """Start receiving into `buffer`."""
        work = dist.irecv(buffer, self._groups.members[message.source], group=self._group(message))
        assert work is not None
        self._receiving[message] = (work, buffer)

    def wait(self, message: Message) -> torch.Tensor:
        """Return the received tensor. Any computation that is issued later waits until the data has arrived."""
        work, buffer = self._receiving.pop(message)
        work.wait()
        return buffer

    def finish(self) -> None:
        """Wait until all sends of the iteration are complete."""
        assert not self._receiving, (
            f"receives were posted but never awaited: {[str(message) for message in self._receiving]}"
        )
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _group(self, message: Message) -> dist.ProcessGroup:
        return self._groups.edges[(message.source, message.target, message.channel)]
