"""`--rank-report DIR`: reports each rank's memory and compute time, under Megatron's own schedules as well as ours.

Every rank of the first pipeline writes DIR/rank_<pipeline rank>.json after every training iteration. The report
contains the time of the rank's passes in the last KEPT iterations. On a GPU, this is the device time between CUDA
events. Without a GPU, it is the CPU time of the computing thread, not including waits for a core. The report also
contains the peak memory of the whole run.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_vp.files import write_report
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import SettledJob, process
from megatron_vp.runtime.groups import pipeline_device
from megatron_vp.runtime.launcher_store import PATIENCE_SECONDS, Notes
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule.instructions import Run, RunPair, kind_of
from megatron_vp.schedule.passes import Schedule
from megatron_vp.trace.rank_files import path_of
from megatron_vp.trace.rank_reports import SIZES
from megatron_vp.vocab.shards import VocabShards

KEPT = 200
"""The largest number of iterations whose times a report contains. This limit keeps reports of long runs small."""


class RankReport:
    """Writes a summary of this rank's training iterations to the folder that --rank-report names.

    `run` has the run's name, schedule and vocabulary method, which are the same on all ranks.
    """

    def __init__(self, args: Arguments, run: Mapping[str, str]) -> None:
        self._args, self._run = args, run
        self._iterations: deque[tuple[float, int, dict[str, float]]] = deque(maxlen=KEPT)
        """Of each iteration: milliseconds, microbatches, and the milliseconds by kind of pass."""
        self._in_flight = 0.0
        self._now = self._most = 0

    def begin(self) -> bool:
        """Begin an iteration, which is always recorded: reset the memory peak."""
        self._now = _allocated(restart=True)[0]
        return True

    def add(self, recorder: Recorder, schedule: Schedule, model: Sequence[torch.nn.Module], in_flight: float) -> None:
        """Add an iteration that `recorder` has finished recording, and write the report. At most `in_flight`
        microbatches had activations in memory.
        """
        passes = defaultdict[str, float](float)
        for span in recorder.spans:
            if isinstance(span.work, Run | RunPair):
                passes[kind_of(span.work)] += span.computed
        self._iterations.append((recorder.milliseconds, schedule.microbatches, passes))
        self._in_flight = max(self._in_flight, in_flight)
        self._most = max(self._most, _allocated()[1])
        self._write([parameter for chunk in model for parameter in chunk.parameters()])

    def _write(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        took, microbatches, passes = map(list, zip(*self._iterations, strict=True))
        content = {
            **self._run,
            "pipeline_rank": rank,
            "pipeline_size": self._args.pipeline_model_parallel_size,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "microbatches": microbatches[-1],
            "log_interval": self._args.log_interval,
            "peak_microbatches_in_flight": self._in_flight,
            "iterations": len(took),
            "iteration_milliseconds": took,
            "microbatches_by_iteration": microbatches,
            "pass_milliseconds": {kind: sum(each.get(kind, 0.0) for each in passes) for kind in passes[0]},
            "pass_milliseconds_by_iteration": passes,
            "memory_bytes": self._memory(parameters),
            "sizes": {name: size for name in SIZES if (size := getattr(self._args, name, None)) is not None},
            "layers": layers_given(self._args),
            "vocab_rows": self._rows(),
        }
        path = path_of(Path(self._args.rank_report), rank)
        write_report(path, json.dumps(content, indent=1) + "\n", "the rank report")

    def _rows(self) -> tuple[int, ...] | None:
        """Vocabulary rows of every pipeline rank; None if they are not split."""
        args = self._args
        if not args.vocab_parallel:
            return None
        tensor = args.tensor_model_parallel_size
        return VocabShards(
            args.padded_vocab_size, args.pipeline_model_parallel_size * tensor, tensor, args.vocab_rows
        ).by_stage

    def _memory(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, int]:
        """Bytes by name: weights, main gradients, and, if measured, allocated and peak memory."""
        gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
        memory = {
            "parameters": sum(parameter.nbytes for parameter in parameters),
            "gradients": sum(gradient.nbytes for gradient in gradients if gradient is not None),
        }
        if self._most:
            memory |= {"allocated": self._now, "peak": self._most}
        if process.meter is None and pipeline_device().type == "cuda":
            free, total = torch.cuda.mem_get_info()
            # What PyTorch's allocator reserved at most, and what the CUDA context, kernels, library workspaces,
            # communicators and other processes use now.
            memory["reserved"] = torch.cuda.max_memory_reserved()
            memory["outside"] = total - free - torch.cuda.memory_reserved()
        return memory


def _allocated(restart: bool = False) -> tuple[int, int]:
    """Bytes that are allocated now, and the most at one time since the last `restart`; zeros on a CPU, unless the run
    is a replay with --shapes-only.
    """
    counted = process.meter
    if counted is None and pipeline_device().type != "cuda":
        return 0, 0
    if restart:
        torch.cuda.reset_peak_memory_stats() if counted is None else counted.restart()
    if counted is None:
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return counted.allocated, counted.peak


def in_first_pipeline(job: SettledJob) -> bool:
    """Whether this rank belongs to the pipeline that writes reports. All ranks of this pipeline have tensor, context
    and data-parallel rank 0.

    A rank that is replayed without peers always writes reports, because no other rank exists.
    """
    if job.arguments.fake_process_group:
        return True
    other = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return not other and not parallel_state.get_tensor_model_parallel_rank()


def described(job: SettledJob) -> dict[str, str]:
    """Return the schedule, the vocabulary method, and a name that is the same on all ranks of this run and different
    from the name of any other run. All ranks of the pipeline must call this once.
    """
    family, run = job.settings.family, ""
    if not job.arguments.fake_process_group:
        notes = Notes("report")
        if parallel_state.get_pipeline_model_parallel_rank() == 0:
            notes.leave(0, secrets.token_hex(8))
        run = notes.read([0], PATIENCE_SECONDS)[0]
    return {"run": run, "schedule": family.name, "vocab": family.method(job.method).value}
