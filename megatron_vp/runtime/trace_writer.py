"""Writes the trace of one rank: the spans of the traced iterations, on one time axis for all ranks of the pipeline.

All ranks leave an all-gather at nearly the same moment. The median difference between rank 0's clock and this rank's
clock at the end of a few all-gathers is added to this rank's times. Ranks on rank 0's host read the same clock as rank
0, so their times need no correction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

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


def align(pipeline: dist.ProcessGroup) -> tuple[int, int, int]:
    """Compare this rank's clock with rank 0's. All pipeline ranks must call this while no schedule is running.

    Returns nanoseconds: the number to add to this rank's `perf_counter_ns` to get rank 0's, and the present time on
    rank 0's `perf_counter_ns` and `time_ns`, which are the same numbers on all ranks.
    """
    token = torch.zeros(1, device=pipeline_device())
    tokens = token.new_zeros(pipeline.size())
    ends = []
    for _ in range(_ROUNDS):
        dist.all_gather_into_tensor(tokens, token, pipeline)
        tokens.tolist()  # On a GPU, `tolist` makes the host wait for the all-gather.
        ends.append(time.perf_counter_ns())
    host = _BOOT.read_text() if _BOOT.exists() else pipeline.rank()
    (ends_0, host_0, wall), *_ = from_all((ends, host, time.time_ns()), pipeline)
    return 0 if host == host_0 else round(median(map(sub, ends_0, ends))), ends_0[-1], wall


class PipelineTrace:
    """Traces some training iterations of a job, and writes the rank's trace file after each of these iterations.

    Args:
        folder: every rank writes `rank_<r>.json` there.
        iterations: the iterations to trace, counted from 1 at the start of the job; the same on all ranks.
        pipeline: connects the ranks of the pipeline.
    """

    def __init__(self, folder: Path, iterations: range, pipeline: dist.ProcessGroup) -> None:
        self._folder, self._iterations, self._pipeline = folder, iterations, pipeline
        self._iteration = 0
        self._alignments: list[tuple[int, int, int]] = []
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
        _, origin, wall = self._alignments[0]
        shift = self._alignments[-1][0] - origin
        self._microbatches[self._iteration] = schedule.microbatches
        self._spans += traced_spans(recorder.spans, self._iteration, shift)
        trace = RankTrace(
            run=str(wall),
            rank=self._pipeline.rank(),
            schedule=schedule.name,
            vocab=schedule.vocab.value,
            placement=schedule.placement.stage_of,
            microbatches=self._microbatches,
            spans=tuple(self._spans),
        )
        write_report(path_of(self._folder, trace.rank), trace.to_json(), "the pass trace")


def traced_spans(spans: Sequence[Span], iteration: int, shift: int) -> list[TracedSpan]:
    """Convert recorded spans to trace spans, sorted by start, with times later by `shift` nanoseconds.

    Posts get no spans, because they take no time.
    """
    traced = []
    for span in spans:
        lane, name = Lane.COMPUTE, str(span.work)
        times = ((span.start + shift) / 1e6, (span.end + shift) / 1e6)
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
        traced.append(TracedSpan(iteration, lane, name, category, *times))
    return sorted(traced, key=lambda item: item.start)
