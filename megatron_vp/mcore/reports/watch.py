"""Records training iterations for `--rank-report` and `--pipeline-trace`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vp.mcore.reports.job_partition import iterations_in
from megatron_vp.mcore.reports.rank_report import RankReport, described, in_first_pipeline
from megatron_vp.mcore.settled import SettledJob, current
from megatron_vp.runtime.groups import pipeline_device
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import PipelineTrace
from megatron_vp.schedule.passes import Schedule

_reports: list[Any] | None = None
"""The reports of this run. `begin` says whether the next iteration is recorded, and `add` adds the recording."""


@dataclass(frozen=True)
class Watch:
    """The recorder of one iteration, and the reports that use the recorded times."""

    recorder: Recorder
    reports: list[Any]

    def finish(self, model: list[torch.nn.Module], schedule: Schedule, in_flight: float) -> None:
        """Finish the iteration on this rank, and pass the recording to the reports.

        in_flight: the largest number of microbatches whose activations this rank held at once.
        """
        self.recorder.finish()
        for report in self.reports:
            report.add(self.recorder, schedule, model, in_flight)


def watch(job: SettledJob, pipeline: dist.ProcessGroup) -> Watch | None:
    """Return the watch for the next training iteration; None if nothing is recorded. Call before each iteration.

    All ranks of `pipeline` must call this function together.
    """
    global _reports
    args = job.arguments
    if (args.rank_report is None and args.pipeline_trace is None) or not in_first_pipeline(job):
        return None
    if _reports is None:
        _reports = []
        if args.pipeline_trace is not None:
            iterations = iterations_in(args.pipeline_trace_iterations)
            folder = Path(args.pipeline_trace)
            folder.mkdir(parents=True, exist_ok=True)
            _reports.append(PipelineTrace(folder, iterations, pipeline))
        if args.rank_report is not None:
            _reports.append(RankReport(args, described(job)))
    due = [report for report in _reports if report.begin()]
    return Watch(Recorder(pipeline_device()), due) if due else None


def _by_interval(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def training_log(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> bool:
        # Megatron keeps the sums of the first iteration after a start for the next line, because this iteration is
        # logged even within an interval. If the iteration ends an interval, the next line must not contain it.
        iteration = args[3]
        within = is_first_iteration and iteration % current().arguments.log_interval != 0
        return original(*args, is_first_iteration=within, **kwargs)

    return training_log
