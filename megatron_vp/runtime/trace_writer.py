"""Writes the trace of one rank: the spans of the traced iterations, on one time axis for all ranks of the pipeline.

No rank leaves an all-gather before every rank has entered it. Let `o` be the number to add to this rank's clock to get
rank 0's clock. Suppose that this rank enters and leaves an all-gather at times `enter` and `leave` on its own clock,
and that rank 0 does so at `enter_0` and `leave_0` on its own clock. Then `enter_0 - leave <= o <= leave_0 - enter`. A
few all-gathers narrow `o` down to an interval. Its midpoint is taken as `o`, and half its width bounds the error. Ranks
on rank 0's host read the same clock as rank 0, so their offset is exactly 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_vp.files import write_report
from megatron_vp.runtime.groups import from_all, pipeline_device
from megatron_vp.runtime.recorder import Recorder, Span
from megatron_vp.schedule.instructions import Load, Loss, Post, Run, Wait
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.transfers import Copy, category_of
from megatron_vp.trace.rank_files import LOAD, LOSS, WAIT, RankTrace, TracedSpan, path_of

_ROUNDS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Alignment(NamedTuple):
    """Relates this rank's clock to rank 0's; all fields are in nanoseconds.

    offset: the number to add to this rank's `perf_counter_ns` to get rank 0's.
    error: bound on the error of `offset`.
    origin: a reference time on rank 0's clock; the same number on all ranks.
    wall: rank 0's `time_ns` at about the time `origin`; the same number on all ranks.
    """

    offset: int
    error: int
    origin: int
    wall: int


def align(pipeline: dist.ProcessGroup) -> Alignment:
    """Compare this rank's clock with rank 0's. All pipeline ranks must call this while no schedule is running."""
    token = torch.zeros(1, device=pipeline_device())
    tokens = token.new_zeros(pipeline.size())
    enter, leave = [], []
    for _ in range(_ROUNDS):
        enter.append(time.perf_counter_ns())
        dist.all_gather_into_tensor(tokens, token, pipeline)
        tokens.tolist()  # On a GPU, `tolist` makes the host wait for the all-gather.
        leave.append(time.perf_counter_ns())
    host = _BOOT.read_text() if _BOOT.exists() else pipeline.rank()
    (enter_0, leave_0, first_host, wall), *_ = from_all((enter, leave, host, time.time_ns()), pipeline)
    lowest = max(a - b for a, b in zip(enter_0, leave, strict=True))
    highest = min(a - b for a, b in zip(leave_0, enter, strict=True))
    if host == first_host and lowest <= 0 <= highest:
        lowest = highest = 0
    return Alignment((lowest + highest) // 2, (highest - lowest) // 2, leave_0[-1], wall)


class PipelineTrace:
    """Traces some training iterations of a job, and writes the rank's trace file after each of these iterations.

    Args:
        folder: every rank writes `rank_<r>.json` there.
        iterations: the iterations to trace, counted from 1 at the start of the job; the same on all ranks.
        pipeline: connects the ranks of the pipeline.
    """

    def __init__(self, folder: Path, iterations: range, pipeline: dist.ProcessGroup) -> None:
        self._folder, self._iterations, self._pipeline = folder, iterations, pipeline
        self._iteration, self._clock_error = 0, 0.0
        self._alignments: list[Alignment] = []
        self._microbatches: dict[int, int] = {}
        self._spans: list[TracedSpan] = []

    def begin(self) -> bool:
        """Count an iteration. If it is traced, compare the ranks' clocks and return True. Otherwise return False."""
        self._iteration += 1
        if self._iteration not in self._iterations:
            return False
        self._alignments.append(align(self._pipeline))
        return True

    def add(self, recorder: Recorder, schedule: Schedule, *_unused: Any) -> None:
        """Add the iteration that `recorder` has finished, and write the file."""
        first, now = self._alignments[0], self._alignments[-1]
        shift = now.offset - first.origin
        self._microbatches[self._iteration] = schedule.microbatches
        self._clock_error = max(self._clock_error, (now.error + recorder.clock_error) / 1e6)
        self._spans += traced_spans(recorder.spans, self._iteration, lambda nanoseconds: (nanoseconds + shift) / 1e6)
        trace = RankTrace(
            run=str(first.wall),
            rank=self._pipeline.rank(),
            schedule=schedule.name,
            vocab=schedule.vocab.value,
            placement=schedule.placement.stage_of,
            microbatches=self._microbatches,
            clock_error=self._clock_error,
            spans=tuple(self._spans),
        )
        write_report(path_of(self._folder, trace.rank), trace.to_json(), "the pass trace")


def traced_spans(spans: Sequence[Span], iteration: int, axis: Callable[[int], float]) -> list[TracedSpan]:
    """Convert recorded spans to trace spans, sorted by start.

    Posts get no spans, because they take no time. `axis` converts a recorded moment to milliseconds.
    """
    traced = []
    for span in spans:
        lane, name = Lane.COMPUTE, str(span.work)
        match span.work:
            case Post():
                continue
            case Run(action):
                name, category = str(action), action.kind.value
            case Load():
                category = LOAD
            case Loss():
                category = LOSS
            case Wait(operation):
                lane, name, category = Lane.WAITS, str(operation), WAIT
            case operation:
                lane = Lane.COPIES if isinstance(operation, Copy) else Lane.SECOND_STREAM
                category = category_of(operation)
        traced.append(TracedSpan(iteration, lane, name, category, axis(span.start), axis(span.end)))
    return sorted(traced, key=lambda item: item.start)
