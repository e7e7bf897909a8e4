"""What passes of a given length run on: the host itself, or a device behind it. Neither needs a core for them."""

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
"""Seconds by which the kernel ends a sleep late: timer slack, and the way to a core."""


class SleepingDevice(Protocol):
    """Where the passes of a sleeping model last."""

    def lasting(self, seconds: float) -> AbstractContextManager[None]:
        """A pass of this length; what the host does for it is done inside."""

    def synchronise(self) -> None:
        """Block the host until everything issued so far is over."""

    def serving(self) -> AbstractContextManager[None]:
        """Inside, pipelines run on this device."""


class HostDevice:
    """A pass holds up the host while it lasts, as computation on a CPU does."""

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """See `SleepingDevice`: what the runtime makes of its inputs is part of the pass, the rest is slept."""
        end = time.perf_counter() + seconds
        yield
        while (left := end - LATE - time.perf_counter()) > 0:
            time.sleep(left)
        while time.perf_counter() < end:
            pass

    def synchronise(self) -> None:
        """See `SleepingDevice`: everything is over."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """See `SleepingDevice`: the runtime's own streams and messages."""
        yield


class AsynchronousDevice:
    """A queue of passes, and of waits for what other streams do, that the host runs ahead of: a CUDA stream on a CPU.

    It keeps a device's time. A pass begins when the one before it is over, when the host has issued it, or when what it
    waits for is there, whichever is last; that the thread which plays the device is woken late delays the messages and
    collectives behind a pass, not the next pass.
    """

    def __init__(self) -> None:
        self._queue = ThreadStream()
        self._free = 0.0

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """See `SleepingDevice`: issues the pass when the host is through with it."""
        yield
        issued = time.perf_counter()

        def last() -> None:
            self._free = max(self._free, issued) + seconds
            if (left := self._free - time.perf_counter()) > 0:
                time.sleep(left)

        self._queue.submit(last)

    def mark(self) -> ThreadEvent:
        """Where the queue is now."""
        return self._queue.submit(lambda: None)

    def wait(self, ready: Callable[[], float]) -> None:
        """Hold up what is issued later until `ready` returns, with the time at which it could have."""

        def hold() -> None:
            self._free = max(self._free, ready())

        self._queue.submit(hold)

    def synchronise(self) -> None:
        """See `SleepingDevice`; raises what any stream raised that the device waited for."""
        self._queue.synchronise()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """See `SleepingDevice`: the second stream and every communicator queue up behind the passes, as on CUDA."""
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
    """Something that a stream beside the passes does; an event of the second stream, or the work of a message."""

    def __init__(self, device: AsynchronousDevice, event: ThreadEvent, over: list[float]) -> None:
        self._device = device
        self._event = event
        self._over = over

    def wait(self) -> None:
        """Order what the device is given later after it; the host goes on."""

        def ready() -> float:
            self._event.wait()
            return self._over[0]

        self._device.wait(ready)

    def host_wait(self) -> None:
        """Block the host until it is over."""
        self._event.wait()

    def done(self) -> bool:
        """Whether it is over."""
        return self._event.done()

    is_completed = done


class DeviceStream:
    """A stream beside the passes: a function starts when those before it, and the passes issued so far, are over."""

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
        """Order what the device is given later after everything submitted."""
        self.submit(lambda: None).wait()


DEVICES = {"asynchronous": AsynchronousDevice, "host": HostDevice}
