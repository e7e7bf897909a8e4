"""Messages between pairs of ranks, with a separate communicator for each directed edge and kind of message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.iteration import Iteration
from megatron_vp.runtime.store import Slot
from megatron_vp.schedule.transfers import Channel, Message

CONTENT: dict[Channel, tuple[Slot, Callable[[Shapes, int], torch.Tensor]]] = {
    Channel.ACTIVATION: (Slot.ACTIVATION, Shapes.activation),
    Channel.GRADIENT: (Slot.GRADIENT, lambda shapes, stage: shapes.activation(stage + 1)),
    Channel.LABELS: (Slot.LABELS, lambda shapes, _: shapes.token_ids()),
    Channel.TOKEN_LOSS: (Slot.TOKEN_LOSS, lambda shapes, _: shapes.token_values()),
    Channel.TOKEN_GRADIENT: (Slot.TOKEN_GRADIENT, lambda shapes, _: shapes.token_values()),
}
"""For each channel: the store's slot for a message's tensor, and the function that allocates the receive buffer of a
stage.
"""


class Links:
    """Sends tensors from the store, and puts received tensors into it, in one iteration of one rank.

    A sent tensor is kept alive until its send is known to be complete, because the backend can delay reading the tensor
    until the receiver is ready. The schedule itself never blocks on a send. With gloo, sends are known to be complete
    only at the end of the iteration.
    """

    def __init__(self, iteration: Iteration) -> None:
        self._groups, self._store, self._shapes = iteration.groups, iteration.store, iteration.shapes
        self._sending: list[tuple[Any, torch.Tensor]] = []

    def post(self, message: Message) -> Callable[[], None] | None:
        """Start sending a contiguous tensor, or receiving into a new buffer. The function that is returned stores the
        received tensor; any computation that is issued later waits until the data has arrived.
        """
        slot, buffer = CONTENT[message.channel]
        members = self._groups.members
        group = self._groups.edges[(message.source, message.target, message.channel)]
        if message.source == self._groups.rank:
            tensor = self._store.take(slot, message.microbatch, at=message.target_stage)
            self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
            work = dist.isend(tensor, members[message.target], group=group)
            if not self._groups.alone:  # A send without a receiver would never complete.
                self._sending.append((work, tensor))
            return None
        received = buffer(self._shapes.of(message.microbatch), message.target_stage)
        receiving: Any = dist.irecv(received, members[message.source], group=group)

        def complete() -> None:
            receiving.wait()
            self._store.put(slot, message.microbatch, received, at=message.target_stage)

        return complete

    def finish(self) -> None:
        """Wait until all sends of the iteration are complete."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
