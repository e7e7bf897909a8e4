"""Writes the trace of one rank: the spans of the traced iterations, on the pipeline's common time axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_vp.files import write_report
from megatron_vp.runtime.clocks import Alignment, Pipeline, align
from megatron_vp.runtime.recorder import Recorder, Span
from megatron_vp.schedule.instructions import Load, Loss, Post, Run, Wait
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.transfers import Copy
from megatron_vp.trace.partition import UNKNOWN, Partition
from megatron_vp.trace.rank_files import LOAD, LOSS, WAIT, RankTrace, TracedSpan, path_of


@dataclass(frozen=True)
class _Axis:
    """Converts nanoseconds of this host's clock to milliseconds since the first traced iteration began."""

    offset: int
    origin: int

    def __call__(self, nanoseconds: int) -> float:
        return (nanoseconds + self.offset - self.origin) / 1e6


class PipelineTrace:
    """Traces some training iterations of a job, and writes the rank's trace file after each of these iterations.

    Args:
        folder: every rank writes `rank_<r>.json` there.
        iterations: the iterations to trace, counted from 1 at the start of the job; the same on all ranks.
        groups: the groups of this rank's pipeline.
        partition: how the model is split over ranks; the trace file records it.
    """

    def __init__(self, folder: Path, iterations: range, groups: Pipeline, partition: Partition | None = None) -> None:
        self._folder = folder
        self._iterations = iterations
        self._groups = groups
        self._partition = partition or UNKNOWN
        self._iteration = 0
        self._first: Alignment | None = None
        self._now: Alignment | None = None
        self._trace: RankTrace | None = None

    def begin(self) -> bool:
        """Count an iteration. If it is traced, compare the ranks' clocks and return True. Otherwise return False."""
        self._iteration += 1
        if self._iteration not in self._iterations:
            return False
        self._now = align(self._groups)
        self._first = self._first or self._now
        return True

    def add(self, recorder: Recorder, schedule: Schedule) -> None:
        """Add the iteration that `recorder` has finished, and write the file."""
        first, now = self._first, self._now
        assert first is not None and now is not None
        axis = _Axis(now.offset, first.origin)
        trace = self._trace or RankTrace(
            run=str(first.wall),
            rank=self._groups.rank,
            schedule=schedule.name,
            vocab=schedule.vocab.value,
            placement=schedule.placement.stage_of,
            microbatches={},
            clock_error=0.0,
            spans=(),
            partition=self._partition,
        )
        self._trace = replace(
            trace,
            microbatches={**trace.microbatches, self._iteration: schedule.microbatches},
            clock_error=max(trace.clock_error, (now.error + recorder.clock_error) / 1e6),
            spans=trace.spans + tuple(traced_spans(recorder.spans, self._iteration, axis)),
        )
        write_report(path_of(self._folder, self._groups.rank), self._trace.to_json(), "the pass trace")


def traced_spans(spans: list[Span], iteration: int, axis: Callable[[int], float]) -> list[TracedSpan]:
    """Convert recorded spans to trace spans, sorted by start. An operation's span also records when it was posted.

    Posts get no spans, because they take no time. `axis` converts a recorded moment to milliseconds.
    """
    posted = {span.work.operation: axis(span.start) for span in spans if isinstance(span.work, Post)}
    traced = []
    for span in spans:
        start, end = axis(span.start), axis(span.end)
        match span.work:
            case Run(action):
                traced.append(TracedSpan(iteration, Lane.COMPUTE, str(action), action.kind.value, start, end))
            case Load():
                traced.append(TracedSpan(iteration, Lane.COMPUTE, str(span.work), LOAD, start, end))
            case Loss():
                traced.append(TracedSpan(iteration, Lane.COMPUTE, str(span.work), LOSS, start, end))
            case Wait(operation):
                traced.append(TracedSpan(iteration, Lane.WAITS, str(operation), WAIT, start, end))
            case Post():
                pass
            case operation:
                lane = Lane.COPIES if isinstance(operation, Copy) else Lane.SECOND_STREAM
                name, moment = str(operation), posted[operation]
                traced.append(TracedSpan(iteration, lane, name, operation.category, start, end, moment))
    return sorted(traced, key=lambda item: item.start)
