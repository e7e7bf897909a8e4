"""Records training iterations for `--rank-report`, `--pipeline-trace` and `--log-pipeline-interval`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_vp.mcore.reports import pipeline_scalars
from megatron_vp.mcore.reports.job_partition import partition_of
from megatron_vp.mcore.reports.rank_report import RankReport, described, in_first_pipeline
from megatron_vp.mcore.reports.trace_option import iterations_in
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.runtime.communicator import Communicator
from megatron_vp.runtime.groups import pipeline_device
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import PipelineTrace
from megatron_vp.schedule.passes import Schedule

_reports: tuple[RankReport | None, PipelineTrace | None] | None = None


@dataclass(frozen=True)
class Watch:
    """The recorder of one iteration, and the reports that use the recorded times."""

    recorder: Recorder
    report: RankReport | None
    trace: PipelineTrace | None
    iteration: int | None
    """Number of the iteration if `--log-pipeline-interval` records it."""

    def finish(self, model: list[torch.nn.Module], schedule: Schedule, in_flight: float, logits: int = 0) -> None:
        """Finish the iteration on this rank, and pass the recording to the reports.

        in_flight: the largest number of microbatches whose activations this rank held at once.
        logits: the largest number of microbatches whose logits this rank held at once.
        """
        self.recorder.finish()
        if self.report:
            self.report.add(self.recorder, model, schedule.microbatches, in_flight, logits)
        if self.trace:
            self.trace.add(self.recorder, schedule)
        if self.iteration is not None:
            pipeline_scalars.leave(
                parallel_state.get_pipeline_model_parallel_rank(), self.iteration, self.recorder.spans
            )


def watch(job: SettledJob, pipeline: Callable[[], Communicator]) -> Watch | None:
    """Return the watch for the next training iteration; None if nothing is recorded. Call before each iteration.

    All ranks of a pipeline must call this function together. `pipeline`, which connects these ranks, is called only
    with --pipeline-trace.
    """
    global _reports
    args = job.arguments
    asked = args.rank_report is not None or args.pipeline_trace is not None or args.log_pipeline_interval
    if not asked or not in_first_pipeline(job):
        return None
    if _reports is None:
        report = None if args.rank_report is None else RankReport(args, described(job))
        trace = None
        if args.pipeline_trace is not None:
            place = parallel_state.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size
            iterations = iterations_in(args.pipeline_trace_iterations)
            trace = PipelineTrace(Path(args.pipeline_trace), iterations, pipeline(), *place, partition_of(args))
        _reports = report, trace
    report, trace = _reports
    if trace is not None and not trace.begin():
        trace = None
    iteration = job.args.curr_iteration + 1 if job.args and pipeline_scalars.is_recorded(job.args) else None
    if report is None and trace is None and iteration is None:
        return None
    if report:
        report.begin()
    return Watch(Recorder(pipeline_device()), report, trace, iteration)
