"""`--log-pipeline-interval N`: logs to TensorBoard and W&B how busy the pipeline was in every N-th iteration.

After such an iteration, each rank of the pipeline leaves its figures in the launcher's store. The job's last rank,
which writes TensorBoard's files, reads them when Megatron logs the iteration.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron.core import parallel_state
from megatron.training.utils import print_rank_last

from megatron_vp.mcore.settled import current
from megatron_vp.runtime.launcher_store import Notes, named
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import traced_spans
from megatron_vp.trace.figures import RankFigures, rank_figures, scalars

_PATIENCE_SECONDS = 10.0
"""The longest time to wait for the figures of an iteration, which all ranks have finished."""


class PipelineScalars:
    """Leaves this rank's figures of every N-th iteration for the job's last rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    @property
    def _iteration(self) -> int:
        return self._args.curr_iteration + 1  # Megatron counts completed iterations.

    def begin(self) -> bool:
        """Whether the next training iteration is recorded."""
        return self._iteration % self._args.log_pipeline_interval == 0

    def add(self, recorder: Recorder, *_unused: Any) -> None:
        """Leave the figures of an iteration. If Megatron repeats the iteration, the last figures count."""
        spans = traced_spans(recorder.spans, self._iteration, lambda nanoseconds: nanoseconds / 1e6)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        Notes(f"scalars/{self._iteration}").leave(rank, json.dumps(asdict(rank_figures(spans))))


def _write(iteration: int, ranks: int) -> None:
    """Log the metrics of an iteration, or say which of the `ranks` ranks of the pipeline left no figures."""
    notes = Notes(f"scalars/{iteration}")
    found = notes.read(range(ranks), _PATIENCE_SECONDS)
    if silent := [rank for rank in range(ranks) if rank not in found]:
        print_rank_last(f"> no pipeline metrics of iteration {iteration}: no word from {named(silent)}")
        return
    notes.remove(range(ranks))
    _log(scalars([RankFigures(**json.loads(text)) for text in found.values()]), iteration)


def _log(values: dict[str, float], iteration: int) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb_writer:
        wandb_writer.log(values, iteration)


def _by_interval(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def training_log(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> bool:
        job, iteration = current().args, args[3]
        # Megatron keeps the sums of the first iteration after a start for the next line, because this iteration is
        # logged even within an interval. If the iteration ends an interval, the next line must not contain it.
        kwargs["is_first_iteration"] = is_first_iteration and iteration % job.log_interval != 0
        report_memory = original(*args, **kwargs)
        every = job.log_pipeline_interval
        if every and iteration % every == 0 and job.rank == job.world_size - 1:
            _write(iteration, job.pipeline_model_parallel_size)
        return report_memory

    return training_log
