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
    """Start and end of timed work (nanoseconds of `time.time_ns`), and its compute time (milliseconds)."""

    work: Work
    start: int
    end: int
    computed: float


class Recorder:
    """Times one iteration, from construction to `finish`. Its `span` is an `Observer` of the runtime.

    On a GPU, the host waits for a first event, before the iteration, to relate the times of events to its own clock.
    Without a GPU, compute time is a thread's CPU time, so it excludes waits for a core.

    spans: everything recorded; spans of one stream or thread are in the order in which they ended.
    milliseconds: after `finish`, how long the iteration took.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Work, Any, Any]] = []
        self.spans: list[Span] = []
        self.milliseconds = 0.0
        if self._on_gpu:
            torch.cuda.synchronize()
            before = time.time_ns()
            self._anchor = self._mark()
            self._anchor.synchronize()
            self._anchor_ns = (before + time.time_ns()) // 2
        self._started = time.perf_counter_ns()

    def _mark(self) -> Any:
        """Mark the current moment on the current stream or thread."""
        if not self._on_gpu:
            return time.time_ns(), time.thread_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, work: Work) -> Iterator[None]:
        """Time the work in this context; two threads may use the recorder at once."""
        start = self._mark()
        yield
        self._marks.append((work, start, self._mark()))

    def finish(self) -> None:
        """At the end of the iteration, wait until all marks can be read, and read them."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self.milliseconds = (time.perf_counter_ns() - self._started) / 1e6
        for work, start, end in self._marks:
            if self._on_gpu:
                first, last = (self._anchor_ns + round(1e6 * self._anchor.elapsed_time(each)) for each in (start, end))
                computed = start.elapsed_time(end)
            else:
                (first, begun), (last, ended) = start, end
                computed = (ended - begun) / 1e6
            self.spans.append(Span(work, first, last, computed))
        self._marks.clear()
