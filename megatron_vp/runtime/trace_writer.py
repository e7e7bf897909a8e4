"""Writes the trace of one rank: the spans of the traced iterations, on one time axis for all ranks of the pipeline.

The axis is that of the hosts' clocks, which a cluster keeps synchronous.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vp.files import write_report
from megatron_vp.runtime.groups import from_all
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule.instructions import Load, Loss, Post, Run, RunPair, Wait, kind_of
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.transfers import Copy, category_of
from megatron_vp.trace.rank_files import LOAD, LOSS, WAIT, RankTrace, TracedSpan, path_of


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
        self._origin: int | None = None
        self._microbatches: dict[int, int] = {}
        self._spans: list[TracedSpan] = []

    def begin(self) -> bool:
        """Count an iteration, and return whether it is traced. All pipeline ranks must call this together."""
        self._iteration += 1
        if self._iteration not in self._iterations:
            return False
        if self._origin is None:
            self._origin, *_ = from_all(time.time_ns(), self._pipeline)
        return True

    def add(self, recorder: Recorder, schedule: Schedule, *_unused: Any) -> None:
        """Add the iteration that `recorder` has finished, and write the file. Posts get no spans, because they take no
        time.
        """
        assert self._origin is not None
        self._microbatches[self._iteration] = schedule.microbatches
        for span in recorder.spans:
            lane, name = Lane.COMPUTE, str(span.work)
            match span.work:
                case Post():
                    continue
                case Run() | RunPair():
                    category = kind_of(span.work)
                case Load():
                    category = LOAD
                case Loss():
                    category = LOSS
                case Wait(operation):
                    lane, name, category = Lane.WAITS, str(operation), WAIT
                case operation:
                    lane = Lane.COPIES if isinstance(operation, Copy) else Lane.SECOND_STREAM
                    category = category_of(operation)
            times = ((moment - self._origin) / 1e6 for moment in (span.start, span.end))
            self._spans.append(TracedSpan(self._iteration, lane, name, category, *times))
        trace = RankTrace(
            run=str(self._origin),
            rank=self._pipeline.rank(),
            schedule=schedule.name,
            vocab=schedule.vocab.value,
            placement=schedule.placement.stage_of,
            microbatches=self._microbatches,
            spans=tuple(sorted(self._spans, key=lambda item: item.start)),
        )
        write_report(path_of(self._folder, trace.rank), trace.to_json(), "the pass trace")
