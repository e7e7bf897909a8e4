"""Devices on which passes of a given length run: the host itself, or a device that the host runs ahead of.

Neither uses a core for the passes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Protocol
from unittest import mock

import torch
import torch.distributed as dist

from megatron_vp.runtime import links, pipeline
from megatron_vp.runtime.streams import ThreadEvent, ThreadStream

LATE = 8e-5
"""The seconds by which the kernel ends a sleep late, because of timer slack and the time to get a core."""


class SleepingDevice(Protocol):
    """A device on which the passes of a sleeping model run."""

    def lasting(self, seconds: float) -> AbstractContextManager[None]:
        """Run a pass of this length; the host does its work for the pass inside this context."""

    def synchronise(self) -> None:
        """Block the host until everything that was issued has ended."""

    def serving(self) -> AbstractContextManager[None]:
        """Let pipelines run on this device inside this context."""


class HostDevice:
    """A device on which a pass blocks the host, as computation on a CPU does."""

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """See `SleepingDevice`. The runtime's own work is part of the pass; the host sleeps for the rest."""
        end = time.perf_counter() + seconds
        yield
        while (left := end - LATE - time.perf_counter()) > 0:
            time.sleep(left)
        while time.perf_counter() < end:
            pass

    def synchronise(self) -> None:
        """See `SleepingDevice`. Everything has already ended."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """See `SleepingDevice`. The runtime keeps its own streams and messages."""
        yield


class AsynchronousDevice:
    """A queue of passes, and of waits for other streams, that the host runs ahead of, like a CUDA stream on a CPU.

    It keeps the time that a device would have. A pass begins when the previous one has ended, when the host has issued
    it, or when the operation that it waits for has ended, whichever is last. If the thread that plays the device is
    woken late, this delays messages and collectives after a pass, but not the next pass.
    """

    def __init__(self) -> None:
        self._queue = ThreadStream()
        self._free = 0.0

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """See `SleepingDevice`. The pass is issued when the host has finished its work for it."""
        yield
        issued = time.perf_counter()

        def last() -> None:
            self._free = max(self._free, issued) + seconds
            if (left := self._free - time.perf_counter()) > 0:
                time.sleep(left)

        self._queue.submit(last)

    def mark(self) -> ThreadEvent:
        """Mark the current end of the queue."""
        return self._queue.submit(lambda: None)

    def wait(self, ready: Callable[[], float]) -> None:
        """Delay what is issued later until `ready` returns; it returns the time at which the wait could have ended."""

        def hold() -> None:
            self._free = max(self._free, ready())

        self._queue.submit(hold)

    def synchronise(self) -> None:
        """See `SleepingDevice`. Raises the error of any stream that the device waited for."""
        self._queue.synchronise()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """See `SleepingDevice`. The second stream and every communicator run after the issued passes, as on CUDA."""
        streams: dict[dist.ProcessGroup, DeviceStream] = defaultdict(lambda: DeviceStream(self))

        def isend(tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> DeviceEvent:
            return streams[group].submit(lambda: dist.send(tensor, target, group=group))

        def irecv(buffer: torch.Tensor, source: int, group: dist.ProcessGroup) -> DeviceEvent:
            return streams[group].submit(lambda: dist.recv(buffer, source, group=group))

        with (
            mock.patch.object(pipeline, "second_stream", lambda *_, **__: DeviceStream(self)),
            mock.patch.object(links, "dist", SimpleNamespace(isend=isend, irecv=irecv)),
        ):
            yield


class DeviceEvent:
    """An operation on a stream next to the passes: an event of the second stream, or the work of a message."""

    def __init__(self, device: AsynchronousDevice, event: ThreadEvent, over: list[float]) -> None:
        self._device = device
        self._event = event
        self._over = over

    def wait(self) -> None:
        """Let what is issued to the device later run after this operation; the host continues."""

        def ready() -> float:
            self._event.wait()
            return self._over[0]

        self._device.wait(ready)

    def host_wait(self) -> None:
        """Block the host until the operation has ended."""
        self._event.wait()

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._event.done()

    is_completed = done


class DeviceStream:
    """A stream next to the passes: functions start when earlier ones, and the passes issued so far, have ended."""

    def __init__(self, device: AsynchronousDevice) -> None:
        self._device = device
        self._thread = ThreadStream()

    def submit(self, function: Callable[[], None]) -> DeviceEvent:
        """Queue `function`."""
        mark, over = self._device.mark(), []

        def run() -> None:
            mark.wait()
            function()
            over.append(time.perf_counter())

        return DeviceEvent(self._device, self._thread.submit(run), over)

    def synchronise(self) -> None:
        """Let what is issued to the device later run after everything that was submitted."""
        self.submit(lambda: None).wait()


DEVICES = {"asynchronous": AsynchronousDevice, "host": HostDevice}
