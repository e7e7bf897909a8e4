"""`--log-pipeline-interval N`: logs to TensorBoard and W&B how busy the pipeline was in every N-th iteration.

No rank waits for the pipeline figures during training. When the device of a rank has finished an iteration, the rank
reads the timings and puts its figures into the launcher's store. One rank writes TensorBoard's files. Just before it
logs an iteration, it fetches the figures of earlier iterations from the store.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron.core import parallel_state
from megatron.training.utils import print_rank_last

from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.settled import SettledJob, current
from megatron_vp.runtime.launcher_store import Notes, named
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import traced_spans
from megatron_vp.trace.figures import RankFigures, rank_figures, scalars

_PATIENCE_SECONDS = 10.0
"""The longest time to wait for the figures of a run's last iteration."""


class PipelineScalars:
    """Records every `interval`-th iteration of pipeline rank `rank`. The job's last rank logs metrics that are computed
    from the figures of all `ranks` pipeline ranks.
    """

    def __init__(self, interval: int, rank: int, ranks: int) -> None:
        self._interval, self._rank, self._ranks = interval, rank, ranks
        self._running = 0
        self._recorded: dict[int, Recorder] = {}
        self._due: list[int] = []

    def begin(self, iteration: int) -> bool:
        """Begin an iteration, counted from 1; return whether it should be recorded."""
        self._running = iteration
        return iteration % self._interval == 0

    def keep(self, recorder: Recorder) -> None:
        """Keep the recording of the current iteration; if Megatron repeats the iteration, the last recording counts."""
        self._recorded[self._running] = recorder

    def share(self, at_last: bool) -> None:
        """Publish this rank's figures for the recorded iterations that its device has finished. If `at_last` is true,
        wait until the device has finished all of them.
        """
        for iteration, recorder in list(self._recorded.items()):
            if not (at_last or recorder.passed()):
                return
            del self._recorded[iteration]
            (recorder.finish if at_last else recorder.read)()
            spans = traced_spans(recorder.spans, iteration, lambda nanoseconds: nanoseconds / 1e6)
            _notes(iteration).leave(self._rank, json.dumps(asdict(rank_figures(spans))))

    def expect(self, iteration: int) -> None:
        """Make `write` expect figures from all ranks for an iteration that has ended, if the iteration was recorded."""
        if iteration % self._interval == 0:
            self._due.append(iteration)

    def write(self, at_last: bool) -> None:
        """Write the figures of each iteration for which all ranks have published theirs. If `at_last` is true, wait for
        missing figures.
        """
        for each in list(self._due):
            notes, ranks = _notes(each), range(self._ranks)
            found = notes.read(ranks, _PATIENCE_SECONDS if at_last else 0.0)
            if silent := set(ranks) - found.keys():
                if at_last:  # The run has trained to its end, and must still save its last checkpoint.
                    print_rank_last(f"> no pipeline metrics of iteration {each}: no word from {named(sorted(silent))}")
                return
            self._due.remove(each)
            notes.remove(ranks)
            _log(scalars([RankFigures(**json.loads(text)) for text in found.values()]), each)


def _notes(iteration: int) -> Notes:
    return Notes(f"scalars/{iteration}")


def _log(values: dict[str, float], iteration: int) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb_writer:
        wandb_writer.log(values, iteration)


_current: PipelineScalars | None = None


def pipeline_scalars(job: SettledJob) -> PipelineScalars | None:
    """Return this process's `PipelineScalars` if the next training iteration should be recorded; otherwise None."""
    if not job.args.log_pipeline_interval:
        return None
    found = _of_process(job)
    # curr_iteration is the number of iterations that Megatron has completed.
    return found if found.begin(job.args.curr_iteration + 1) else None


def _of_process(job: SettledJob) -> PipelineScalars:
    global _current
    if _current is None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        _current = PipelineScalars(job.args.log_pipeline_interval, rank, job.args.pipeline_model_parallel_size)
    return _current


def _by_interval(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def training_log(*args: Any, is_first_iteration: bool = False, **kwargs: Any) -> bool:
        job, iteration = current(), args[3]
        # Megatron keeps the sums of the first iteration after a start for the next line, because this iteration is
        # logged even within an interval. If the iteration ends an interval, the next line must not contain it.
        kwargs["is_first_iteration"] = is_first_iteration and iteration % job.args.log_interval != 0
        if not job.args.log_pipeline_interval:
            return original(*args, **kwargs)
        found, writes = _of_process(job), job.args.rank == job.args.world_size - 1
        if writes:  # W&B rejects a step that precedes the last one logged, so write before Megatron logs.
            found.write(at_last=False)
        report_memory = original(*args, **kwargs)
        at_last = iteration == job.args.train_iters
        found.share(at_last)
        if writes:
            found.expect(iteration)
            if at_last:
                found.write(at_last)
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
