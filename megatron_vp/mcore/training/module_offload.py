"""Lets Megatron move modules' inputs to host memory (`--fine-grained-activation-offloading`) under our schedules.

Megatron's manager records the forwards of its first iteration, but expects the backwards of Megatron's own schedules.
Here, it learns which pass begins. In later iterations, tensors return ahead of the next backward of the recorded order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

from megatron_vp.mcore.model.preparation import RankModel
from megatron_vp.runtime.iteration import Observer
from megatron_vp.schedule.instructions import Run
from megatron_vp.schedule.passes import PassKind, Schedule


class ModuleOffload(PipelineOffloadManager):
    """Megatron's manager for one model's iterations of `schedule`; `forward` is the one that runs."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule, self.forward = schedule, None
        self._handlers: dict[Any, Any] = {}

    def begin(self, instruction: Any) -> None:
        """Let a forward or a backward use its own handler."""
        match instruction:
            case Run((PassKind.F, *which)):
                self.forward = tuple(which)
                self._cur_forward_chunk = self._handlers.get(self.forward)
            case Run((PassKind.B | PassKind.BW, *which)):
                self._cur_backward_chunk = self._handlers[tuple(which)]
                self._cached_chunks_index_backward += 1
                if self._is_warmup:
                    self._cached_chunks_backward.append(self._cur_backward_chunk)

    def init_model_chunk_offload_handler(self, *args: Any, **kwargs: Any) -> None:
        """Give a forward of the first iteration a handler. Evaluation needs none."""
        if self.forward is not None:
            super().init_model_chunk_offload_handler(*args, **kwargs)
            self._handlers[self.forward] = self._cur_forward_chunk

    def pop_forward_chunk(self, name: str | None = None) -> Any:
        """Return the handler of the forward that runs."""
        return self._cur_forward_chunk

    def on_get_saved_tensor(self, saved_state: Any) -> torch.Tensor:
        """Wait for a tensor's own copies. Megatron misses some of them, if only in the first iteration."""
        if not isinstance(saved_state, torch.Tensor):
            group = self._cur_backward_chunk.offload_groups[saved_state[0] - 1]
            group.wait_offload_event(torch.cuda.current_stream())
            group.wait_reload_event(torch.cuda.current_stream())
        return super().on_get_saved_tensor(saved_state)

    def push(self, *_: Any) -> None:
        """Ignore the order of Megatron's own schedules."""

    flush = push


@contextmanager
def offloading(model: RankModel, schedule: Schedule, gradients: bool, observer: Observer) -> Iterator[Observer]:
    """Return the observer for an iteration inside this context. A manager that has recorded another schedule, or an
    iteration that failed, is replaced.
    """
    if not model.chunks[0].config.fine_grained_activation_offloading:
        yield observer
        return
    manager, model.module_offload = model.module_offload, None
    if manager is None or (gradients and manager.schedule is not schedule):
        manager = ModuleOffload(schedule)
    with mock.patch.object(PipelineOffloadManager, "OFFLOAD_MGR", manager):
        yield (lambda each: (manager.begin(each), observer(each))[1]) if gradients else observer
    if gradients:
        manager.reset()
        manager.forward = None
    model.module_offload = manager
