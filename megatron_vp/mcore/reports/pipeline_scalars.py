"""`--log-pipeline-interval N`: logs to TensorBoard and W&B how busy the pipeline was in every N-th iteration.

No rank waits for the pipeline figures during training. When the device of a rank has finished an iteration, the rank
reads the timings and puts its figures into the launcher's store. One rank writes TensorBoard's files. Just before it
logs an iteration, it fetches the figures of earlier iterations from the store.
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

from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.settled import current
from megatron_vp.runtime.launcher_store import Notes, named
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import traced_spans
from megatron_vp.trace.figures import RankFigures, rank_figures, scalars

_PATIENCE_SECONDS = 10.0
"""The longest time to wait for the figures of a run's last iteration."""


_recorded: dict[int, Recorder] = {}
"""This rank's recordings, by iteration, whose figures it has not published yet."""
_due: list[int] = []
"""Recorded iterations that the job's last rank has not written yet."""


def is_recorded(args: argparse.Namespace) -> bool:
    """Whether the next training iteration is recorded."""
    # curr_iteration is the number of iterations that Megatron has completed.
    return bool(args.log_pipeline_interval) and (args.curr_iteration + 1) % args.log_pipeline_interval == 0


def keep(iteration: int, recorder: Recorder) -> None:
    """Keep the recording of an iteration; if Megatron repeats the iteration, the last recording counts."""
    _recorded[iteration] = recorder


def publish(rank: int, at_last: bool) -> None:
    """Publish the figures of pipeline rank `rank` for the recorded iterations that its device has finished. If
    `at_last` is true, wait until the device has finished all of them.
    """
    for iteration, recorder in list(_recorded.items()):
        if not (at_last or recorder.passed()):
            return
        del _recorded[iteration]
        (recorder.finish if at_last else recorder.read)()
        spans = traced_spans(recorder.spans, iteration, lambda nanoseconds: nanoseconds / 1e6)
        Notes(f"scalars/{iteration}").leave(rank, json.dumps(asdict(rank_figures(spans))))


def write(ranks: int, at_last: bool) -> None:
    """Log metrics of each iteration for which all pipeline ranks have published their figures. If `at_last` is true,
    wait for missing figures.
    """
    for iteration in list(_due):
        notes = Notes(f"scalars/{iteration}")
        found = notes.read(range(ranks), _PATIENCE_SECONDS if at_last else 0.0)
        if silent := [rank for rank in range(ranks) if rank not in found]:
            if at_last:  # The run has trained to its end, and must still save its last checkpoint.
                print_rank_last(f"> no pipeline metrics of iteration {iteration}: no word from {named(silent)}")
            return
        _due.remove(iteration)
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
        if not job.log_pipeline_interval:
            return original(*args, **kwargs)
        ranks, writes = job.pipeline_model_parallel_size, job.rank == job.world_size - 1
        if writes:  # W&B rejects a step that precedes the last one logged, so write before Megatron logs.
            write(ranks, at_last=False)
        report_memory = original(*args, **kwargs)
        at_last = iteration == job.train_iters
        publish(parallel_state.get_pipeline_model_parallel_rank(), at_last)
        if writes and iteration % job.log_pipeline_interval == 0:
            _due.append(iteration)
        if writes and at_last:
            write(ranks, at_last)
        return report_memory

    return training_log


PATCHES = (
    Patch(
        "megatron.training.training:training_log",
        _by_interval,
        "begin a new log interval after the first iteration of a start if that iteration ends one, and write the "
        "pipeline metrics of --log-pipeline-interval to TensorBoard and W&B",
    ),
)
