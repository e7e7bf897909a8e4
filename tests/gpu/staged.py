"""Several ranks on one GPU, for tests: messages go through pinned host memory, so that no test depends on NCCL, which
shares a GPU only if every rank poses as a host of its own (`test_nccl.py`).

Streams, events, kernels and all orders are those of a real run. Each group has a stream, and an operation makes this
stream wait for the current stream. The stream then copies the operation's tensors to the host, where a thread of the
group sends them over gloo. Before it copies the results back, the stream waits until the thread has written a number to
host memory. An operation therefore occupies the device from its post until all its peers have joined, as NCCL's kernel
does, and a host that waits for its device also waits for the peers. The host that issues an operation does not wait. On
CPU, which has no streams, the thread that waits for the operation is blocked instead.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from megatron_vp.runtime import groups, links, pipeline
from megatron_vp.runtime.groups import Communicator


class HostFlag:
    """Raised by a thread; the CPU's threads wait for it."""

    def __init__(self) -> None:
        self._raised = threading.Event()

    def set(self) -> None:
        self._raised.set()

    def hold_up_current_stream(self) -> None:
        self._raised.wait()


class DeviceFlag:
    """A number in pinned memory; written and awaited by a stream of the device and by a thread of the host.

    The thread makes no call to CUDA for it: such a call waits while another thread loads a kernel, and that waits for
    the device.
    """

    def __init__(self) -> None:
        self._value = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def set(self) -> None:
        self._value.fill_(1)

    def set_by_current_stream(self) -> None:
        self._enqueue("cuStreamWriteValue32_v2", 0)  # CU_STREAM_WRITE_VALUE_DEFAULT

    def hold_up_host(self) -> None:
        while not self._value.item():
            time.sleep(1e-4)

    def hold_up_current_stream(self) -> None:
        self._enqueue("cuStreamWaitValue32_v2", 0)  # CU_STREAM_WAIT_VALUE_GEQ

    def _enqueue(self, operation: str, flags: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(self._value.data_ptr())
        status = getattr(_driver(), operation)(stream, address, ctypes.c_uint32(1), ctypes.c_uint(flags))
        assert status == 0, f"{operation} failed with {status}"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Lane:
    """The thread of one group: passes messages on in the order in which they were issued.

    What a message took of host memory goes back in the thread that issued it: PyTorch records an event where pinned
    memory is released, and this thread must make no call to CUDA (see `DeviceFlag`).
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._kept: deque[Callable[[], None]] = deque()
        self._let_go: SimpleQueue[None] = SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def issue(
        self, operation: Callable[..., None], given: Sequence[torch.Tensor], filled: Sequence[torch.Tensor]
    ) -> StagedWork:
        """Start `operation(*given, *filled)` on copies in host memory."""
        while not self._let_go.empty():
            self._let_go.get()
            self._kept.popleft()
        on_device = filled[0].is_cuda if filled else given[0].is_cuda
        return (self._issue_on_device if on_device else self._issue_on_host)(operation, given, filled)

    def _issue_on_host(
        self, operation: Callable[..., None], given: Sequence[torch.Tensor], filled: Sequence[torch.Tensor]
    ) -> StagedWork:
        copies = [each.clone() for each in (*given, *filled)]
        flag = HostFlag()

        def end() -> None:
            flag.hold_up_current_stream()
            for tensor, copy in zip(filled, copies[len(given) :], strict=True):
                tensor.copy_(copy)

        work = StagedWork(flag, end)
        self._hand_over(lambda: operation(*copies), work)
        return work

    def _issue_on_device(
        self, operation: Callable[..., None], given: Sequence[torch.Tensor], filled: Sequence[torch.Tensor]
    ) -> StagedWork:
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        copied, arrived, over = DeviceFlag(), DeviceFlag(), torch.cuda.Event()
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in (*given, *filled)]
        work = StagedWork(arrived, lambda: torch.cuda.current_stream().wait_event(over))

        def run() -> None:
            copied.hold_up_host()
            operation(*copies)

        self._hand_over(run, work)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for copy, each in zip(copies, (*given, *filled), strict=True):
                copy.copy_(each, non_blocking=True)
            copied.set_by_current_stream()
            arrived.hold_up_current_stream()
            for tensor, copy in zip(filled, copies[len(given) :], strict=True):
                tensor.copy_(copy, non_blocking=True)
            over.record()
        _under_way[:] = [(event, memory) for event, memory in _under_way if not event.query()]
        _under_way.append((over, (copied, arrived, copies)))
        return work

    def _hand_over(self, transfer: Callable[[], None], work: StagedWork) -> None:
        def run() -> None:
            transfer()
            work.finish()

        self._kept.append(run)
        self._queue.put(run)

    def _work(self) -> None:
        while True:
            run = self._queue.get()
            try:
                run()
            except BaseException:  # nobody waits for this thread: the rank must not hang
                traceback.print_exc()
                os._exit(1)
            del run
            self._let_go.put(None)


_under_way: list[tuple[torch.cuda.Event, object]] = []
"""Host memory that a device may still read."""


class StagedWork:
    """What Links and the communicators use of torch's Work.

    Args:
        flag: raised when the message has been passed on.
        end: orders the current stream after the message.
    """

    def __init__(self, flag: HostFlag | DeviceFlag, end: Callable[[], None]) -> None:
        self._flag = flag
        self._done: Future[None] = Future()
        self.wait = end

    def finish(self) -> None:
        """Called by the lane."""
        self._flag.set()
        self._done.set_result(None)

    def is_completed(self) -> bool:
        return self._done.done()


class StagedCommunicator:
    """A `Communicator` for tensors of any device over gloo."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self._over_gloo = Communicator(group, members)
        self._lane = Lane()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._lane.issue(lambda copy: self._over_gloo.broadcast(copy, root), [], [tensor]).wait()

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        self._lane.issue(lambda own, gathered: self._over_gloo.all_gather(gathered, own), [own], [gathered]).wait()

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        self._lane.issue(lambda copy: self._over_gloo.reduce(copy, root), [], [tensor]).wait()

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        def operation(sent: torch.Tensor, received: torch.Tensor) -> None:
            self._over_gloo.exchange(received, sent, incoming, outgoing)

        self._lane.issue(operation, [sent], [received]).wait()


@contextmanager
def ranks_share(device: torch.device) -> Iterator[None]:
    """Inside, the runtime computes on `device`, and sends everything through host memory."""
    if device.type == "cuda":
        # PyTorch keeps what is released and hands it out again: asking CUDA for more may wait for the device.
        pinned = [torch.empty(2**power, dtype=torch.uint8, pin_memory=True) for power in range(13) for _ in range(200)]
        del pinned
    lanes: dict[dist.ProcessGroup, Lane] = {}

    def isend(tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> StagedWork:
        lane = lanes.setdefault(group, Lane())
        return lane.issue(lambda copy: dist.send(copy, target, group=group), [tensor], [])

    def irecv(buffer: torch.Tensor, source: int, group: dist.ProcessGroup) -> StagedWork:
        lane = lanes.setdefault(group, Lane())
        return lane.issue(lambda copy: dist.recv(copy, source, group=group), [], [buffer])

    with (
        mock.patch.object(groups, "Communicator", StagedCommunicator),
        mock.patch.object(groups, "pipeline_device", lambda: device),  # for what is imported from here on
        mock.patch.object(pipeline, "pipeline_device", lambda: device),
        mock.patch.object(links, "dist", SimpleNamespace(isend=isend, irecv=irecv)),
    ):
        yield
