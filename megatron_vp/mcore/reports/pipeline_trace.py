"""`--pipeline-trace DIR`: decides which iterations of this job are recorded, and by which ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_vp.errors import UserError
from megatron_vp.mcore.reports.job_partition import partition_of
from megatron_vp.mcore.reports.rank_report import in_first_pipeline
from megatron_vp.mcore.reports.trace_iterations import iterations_in
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.runtime.clocks import Pipeline
from megatron_vp.runtime.trace_writer import PipelineTrace

_current: PipelineTrace | None = None


def pipeline_trace(job: SettledJob, pipeline: Callable[[], Pipeline]) -> PipelineTrace | None:
    """Return the trace that records the next training iteration. Call this function once before each iteration.

    Returns None without --pipeline-trace, outside the requested iterations, and in all pipelines except the first. All
    ranks of a pipeline must call this function together, because it compares their clocks before each requested
    iteration. `pipeline` returns an interface to these ranks.
    """
    global _current
    args = job.args
    if args.pipeline_trace is None or not in_first_pipeline(job):
        return None
    if _current is None:
        iterations = iterations_in(args.pipeline_trace_iterations)
        _current = PipelineTrace(Path(args.pipeline_trace), iterations, pipeline(), partition_of(args))
    return _current if _current.begin() else None


def make_trace_folder(args: argparse.Namespace) -> None:
    """Create the folder that `--pipeline-trace` names. Raises UserError if the folder cannot be created."""
    if args.pipeline_trace is None:
        return
    try:
        Path(args.pipeline_trace).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create the --pipeline-trace folder {args.pipeline_trace} ({error.strerror}): choose another folder"
        ) from None
