"""`--rank-report DIR`: reports each rank's memory and compute time, under Megatron's own schedules as well as ours.

Every rank of the first pipeline writes DIR/rank_<pipeline rank>.json after every training iteration. The report
contains the time of the rank's passes in the last KEPT iterations. On a GPU, this is the device time between CUDA
events. Without a GPU, it is the CPU time of the computing thread, not including waits for a core. The report also
contains the time that the host spent on the same passes, and the peak memory of the whole run.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_vp.files import write_report
from megatron_vp.mcore.reports.job_partition import partition_of
from megatron_vp.mcore.reports.memory import around_tensors, meter
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.runtime.launcher_store import PATIENCE_SECONDS, Notes
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule.instructions import Run

KEPT = 200
"""The largest number of iterations whose times a report contains. This limit keeps reports of long runs small."""


class RankReport:
    """Writes a summary of this rank's training iterations to the folder that --rank-report names.

    `run` has the run's name, schedule and vocabulary method, which are the same on all ranks.
    """

    def __init__(self, args: argparse.Namespace, run: Mapping[str, str]) -> None:
        self._args, self._run = args, run
        self._microbatches: deque[int] = deque(maxlen=KEPT)
        self._pass_milliseconds: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._host_milliseconds: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._iteration_milliseconds: deque[float] = deque(maxlen=KEPT)
        self._allocated = self._peak_allocated = 0
        self._peak_in_flight = 0.0
        self._peak_logits_in_flight = 0

    def begin(self) -> None:
        """Begin an iteration: reset the memory peak."""
        memory = meter()
        if memory is not None:
            memory.restart()
            self._allocated = memory.allocated

    def add(self, recorder: Recorder, model: torch.nn.Module | list[torch.nn.Module], microbatches: int) -> None:
        """Add an iteration that `recorder` has finished recording, and write the report."""
        self._iteration_milliseconds.append(recorder.milliseconds)
        milliseconds: dict[str, float] = defaultdict(float)
        host: dict[str, float] = defaultdict(float)
        for span in recorder.spans:
            if isinstance(span.work, Run):
                milliseconds[span.work.action.kind] += span.computed
                host[span.work.action.kind] += span.issued
        self._microbatches.append(microbatches)
        self._pass_milliseconds.append(milliseconds)
        self._host_milliseconds.append(host)
        memory = meter()
        if memory is not None:
            self._peak_allocated = max(self._peak_allocated, memory.peak)
        chunks = model if isinstance(model, list) else [model]
        self._write([parameter for chunk in chunks for parameter in chunk.parameters()], microbatches)

    def held(self, in_flight: float, logits_in_flight: int = 0) -> None:
        """Record an iteration's peaks: `in_flight` microbatches had activations in memory, and `logits_in_flight` had
        logits.
        """
        self._peak_in_flight = max(self._peak_in_flight, in_flight)
        self._peak_logits_in_flight = max(self._peak_logits_in_flight, logits_in_flight)

    def _write(self, parameters: Sequence[torch.nn.Parameter], microbatches: int) -> None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        path = Path(self._args.rank_report) / f"rank_{rank}.json"
        content = {
            **self._run,
            "pipeline_rank": rank,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "microbatches": microbatches,
            "log_interval": self._args.log_interval,
            "peak_microbatches_in_flight": self._peak_in_flight,
            "peak_microbatches_between_s_and_t": self._peak_logits_in_flight,
            "iterations": len(self._iteration_milliseconds),
            "iteration_milliseconds": list(self._iteration_milliseconds),
            "microbatches_by_iteration": list(self._microbatches),
            "pass_milliseconds": _sums(self._pass_milliseconds),
            "pass_milliseconds_by_iteration": list(self._pass_milliseconds),
            "host_milliseconds_by_iteration": list(self._host_milliseconds),
            "memory_bytes": self._memory(parameters),
            **partition_of(self._args).document(),
        }
        write_report(path, json.dumps(content, indent=1) + "\n", "the rank report")

    def _memory(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, int]:
        """Bytes by name: weights, main gradients, allocated and peak memory (if measured), and `around_tensors()`."""
        gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
        memory = {
            "parameters": sum(parameter.nbytes for parameter in parameters),
            "gradients": sum(gradient.nbytes for gradient in gradients if gradient is not None),
        }
        if self._peak_allocated:
            memory |= {"allocated": self._allocated, "peak": self._peak_allocated}
        return memory | around_tensors()


def _sums(of_iterations: Sequence[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(each[kind] for each in of_iterations) for kind in of_iterations[0]}


def in_first_pipeline(job: SettledJob) -> bool:
    """Whether this rank belongs to the pipeline that writes reports. All ranks of this pipeline have tensor, context
    and data-parallel rank 0.

    A rank that is replayed without peers always writes reports, because no other rank exists.
    """
    if job.args.fake_process_group:
        return True
    other = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return not other and not parallel_state.get_tensor_model_parallel_rank()


def _run_name() -> str:
    """Return a name that is the same on all ranks of this run and different from the name of any other run."""
    notes = Notes("report")
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        notes.leave(0, secrets.token_hex(8))
    return notes.read([0], PATIENCE_SECONDS)[0]


_current: RankReport | None = None


def rank_report(job: SettledJob) -> RankReport | None:
    """Return the report of this process; None without --rank-report, and in all pipelines except the first."""
    global _current
    if job.args.rank_report is None or not in_first_pipeline(job):
        return None
    if _current is None:
        method = job.settings.family.method(job.method)
        run = "" if job.args.fake_process_group else _run_name()
        _current = RankReport(job.args, {"run": run, "schedule": job.settings.family.name, "vocab": method.value})
    return _current
