"""Records training iterations for `--rank-report`, `--pipeline-trace` and `--log-pipeline-interval`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_vp.mcore.reports.pipeline_scalars import PipelineScalars, pipeline_scalars
from megatron_vp.mcore.reports.pipeline_trace import pipeline_trace
from megatron_vp.mcore.reports.rank_report import RankReport, rank_report
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.runtime.clocks import Pipeline
from megatron_vp.runtime.groups import pipeline_device
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import PipelineTrace
from megatron_vp.schedule.passes import Schedule


@dataclass(frozen=True)
class Watch:
    """The recorder of one iteration, and the reports that use the recorded times."""

    recorder: Recorder
    report: RankReport | None
    trace: PipelineTrace | None
    scalars: PipelineScalars | None

    def finish(self, model: list[torch.nn.Module], schedule: Schedule, in_flight: float, logits: int = 0) -> None:
        """Finish the iteration on this rank, and pass the recording to the reports.

        in_flight: the largest number of microbatches whose activations this rank held at once.
        logits: the largest number of microbatches whose logits this rank held at once.
        """
        if self.report or self.trace:
            self.recorder.finish()
        if self.report:
            self.report.held(in_flight, logits)
            self.report.add(self.recorder, model, schedule.microbatches)
        if self.trace:
            self.trace.add(self.recorder, schedule)
        if self.scalars:
            self.scalars.keep(self.recorder)


def watch(job: SettledJob, pipeline: Callable[[], Pipeline]) -> Watch | None:
    """Return the watch for the next training iteration; None if nothing is recorded. Call before each iteration.

    All ranks of a pipeline must call this function together. `pipeline`, which returns an interface to these ranks, is
    called only with --pipeline-trace.
    """
    report, trace, scalars = rank_report(job), pipeline_trace(job, pipeline), pipeline_scalars(job)
    if report is None and trace is None and scalars is None:
        return None
    if report:
        report.begin()
    return Watch(Recorder(pipeline_device(), lean=not (report or trace)), report, trace, scalars)
