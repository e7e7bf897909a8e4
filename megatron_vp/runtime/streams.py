"""A second stream for the vocabulary collectives, with one interface for CUDA and CPU.

`submit` runs a function after everything submitted before it and after the compute work issued so far. Calling `wait`
on the returned event makes later compute work wait for the function. On CUDA, device events enforce both orderings, and
the host continues without waiting. On CPU, the stream is a worker thread, so that gloo's blocking collectives run at
the same time as the passes.

A submitted function writes only into buffers that were allocated on the compute stream. The event keeps the function
and its buffers alive until the compute stream has been told to wait for the event, or until the host knows that the
work has finished. Otherwise, PyTorch could reuse their memory too early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch


def hand_over(tensor: torch.Tensor) -> None:
    """Keep memory that belongs to another stream until the current stream has passed the tensor's release, as memory
    of the current stream. Call this on the compute stream, which must wait for what writes the tensor.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


class CudaEvent:
    """The end of the device work that has been issued so far on the current stream; `wait` and `done` may be called on
    other streams. The event keeps `function`, and so the function's buffers, alive until `wait` is called.
    """

    def __init__(self, function: Callable[[], None] | None = None) -> None:
        self._function = function
        # A host thread that waits for a blocking event sleeps instead of spinning.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def wait(self) -> None:
        """Make the current stream wait for the event; the host continues."""
        torch.cuda.current_stream().wait_event(self._event)
        self._function = None

    def host_wait(self) -> None:
        """Block until the device has passed the event."""
        self._event.synchronize()

    def done(self) -> bool:
        """Whether the device has passed the event."""
        return self._event.query()


class CudaIterations:
    """Counts the iterations that the compute stream has finished; the device writes the count into pinned host memory.

    Any thread may read the count without calling CUDA or waiting for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = torch.zeros(1, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def add(self) -> None:
        """Enqueue an increment of the count behind the compute work issued so far."""
        with torch.no_grad():
            self._on_device.add_(1)
            self._on_host.copy_(self._on_device, non_blocking=True)

    def count(self) -> int:
        """Return the count that the device wrote last."""
        return int(self._on_host.item())


class CudaStream:
    """A high-priority CUDA stream.

    PyTorch reuses its 32 normal-priority streams in turn, and NCCL process groups use the same ones. If this object
    shared a stream with such a group, their operations would wait for each other.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(priority=-1)

    def submit(self, function: Callable[[], None]) -> CudaEvent:
        """Enqueue the function's device work behind the compute work issued so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            function()
            return CudaEvent(function)

    def synchronise(self) -> None:
        """Make the current stream wait for the second stream."""
        torch.cuda.current_stream().wait_stream(self._stream)


class ThreadEvent(Future):
    """Completion of a function that a thread runs. `wait` blocks until it has returned, and raises its error."""

    wait = host_wait = Future.result


class ThreadStream:
    """One worker thread that runs the submitted functions in order. After an error, it skips all later functions, and
    waiting for them raises the same error, because the ranks' collectives may no longer match.

    The thread is a daemon, because a process that fails must be able to exit while a collective still waits for peers.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], ThreadEvent]] = SimpleQueue()
        threading.Thread(target=self._work, name="vocabulary-collectives", daemon=True).start()

    def submit(self, function: Callable[[], None]) -> ThreadEvent:
        """Queue the function on the worker thread."""
        event = ThreadEvent()
        self._queue.put((function, event))
        return event

    def synchronise(self) -> None:
        """Block until the queue is empty. If a function failed, raise its error."""
        self.submit(lambda: None).wait()

    def _work(self) -> None:
        error: BaseException | None = None
        # Each thread has its own grad mode.
        torch.set_grad_enabled(False)
        while True:
            function, event = self._queue.get()
            if error is None:
                try:
                    function()
                except BaseException as caught:
                    error = caught
            if error is None:
                event.set_result(None)
            else:
                event.set_exception(error)
            # Free the function's buffers now, not when the next function arrives.
            del function, event


class InlineStream:
    """Runs each function immediately; used on CPU by a rank without peers, whose functions wait for no other rank."""

    def submit(self, function: Callable[[], None]) -> ThreadEvent:
        """Run `function`."""
        with torch.no_grad():
            function()
        event = ThreadEvent()
        event.set_result(None)
        return event

    def synchronise(self) -> None:
        """Do nothing: everything submitted has already run."""


Event = CudaEvent | ThreadEvent
"""Completion of one submitted function."""
Stream = CudaStream | ThreadStream | InlineStream
"""An ordered queue of functions that run concurrently with the compute stream."""


def second_stream(device: torch.device, alone: bool = False) -> Stream:
    """Create a second stream on `device`; `alone` means that no other rank takes part in the collectives."""
    if device.type == "cuda":
        return CudaStream()
    return InlineStream() if alone else ThreadStream()
