"""Records the start and end of everything that a rank does in one iteration.

On CUDA, a mark is an event on the stream on which the work was enqueued. Events are read only after the iteration,
so taking a mark never waits for the device. On CPU, a mark is a reading of the calling thread's clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vp.schedule.instructions import Instruction
from megatron_vp.schedule.transfers import Operation

Work = Instruction | Operation
"""Anything that is timed: an instruction, or an operation on a stream."""


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of timed work (nanoseconds of this host's `perf_counter`), and its compute time (milliseconds).

    issued: milliseconds that the host took to issue the work. On a GPU, the host should run ahead: if `issued` exceeds
        `computed`, the device waited for launches.
    """

    work: Work
    start: int
    end: int
    computed: float
    issued: float


class HostClock:
    """Takes marks immediately and reads them later. Compute time is a thread's CPU time, so it excludes waits for a
    core.

    error: largest possible difference in nanoseconds between readings and the host's clock. The difference is the same
        for all readings.
    """

    error = 0

    def mark(self) -> Any:
        """Mark the current moment on the current stream or thread."""
        return time.perf_counter_ns(), time.thread_time_ns()

    def drain(self) -> None:
        """Block until all marks can be read."""

    def span(self, work: Work, start: Any, end: Any, issued: float) -> Span:
        """Return the span between two marks of one stream or thread."""
        return Span(work, start[0], end[0], (end[1] - start[1]) / 1e6, issued)


class DeviceClock(HostClock):
    """Marks moments with CUDA events. The host waits for the first event, before the iteration, to relate the times of
    events to its own clock.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        before = time.perf_counter_ns()
        self._anchor = self.mark()
        self._anchor.synchronize()
        after = time.perf_counter_ns()
        self._anchor_ns = (before + after) // 2
        self.error = (after - before) // 2

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def drain(self) -> None:
        """Block until the device has passed every event."""
        torch.cuda.synchronize()

    def span(self, work: Work, start: Any, end: Any, issued: float) -> Span:
        """Return the device time between two events."""
        first, last = (self._anchor_ns + round(1e6 * self._anchor.elapsed_time(event)) for event in (start, end))
        return Span(work, first, last, start.elapsed_time(end), issued)


class Recorder:
    """Times one iteration, from construction to `finish`. Implements the runtime's `Observer`.

    spans: everything recorded; spans of one stream or thread are in the order in which they ended.
    milliseconds: after `finish`, how long the iteration took.
    clock_error: see `HostClock.error`.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock() if device.type == "cuda" else HostClock()
        self.clock_error = self._clock.error
        self._marks: list[tuple[Work, Any, Any, float]] = []
        self._started = time.perf_counter_ns()
        self.spans: list[Span] = []
        self.milliseconds = 0.0

    @contextmanager
    def span(self, work: Work) -> Iterator[None]:
        """Time the work in this context; two threads may use the recorder at once."""
        began, start = time.perf_counter_ns(), self._clock.mark()
        yield
        end = self._clock.mark()
        self._marks.append((work, start, end, (time.perf_counter_ns() - began) / 1e6))

    watch = communicating = span

    def finish(self) -> None:
        """At the end of the iteration, wait until all marks can be read, and read them."""
        self._clock.drain()
        self.milliseconds = (time.perf_counter_ns() - self._started) / 1e6
        self.spans += [self._clock.span(*marks) for marks in self._marks]
        self._marks.clear()
