"""Tells Megatron's data parallelism when a chunk's gradients are final, including those that autograd never sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class GradientSynchronisation:
    """The gradient synchronisation of one chunk (wrapped in Megatron's DDP or not) in one iteration.

    Megatron counts the reports of every parameter in a bucket and reduces the bucket when all have reported. Parameters
    in autograd's graph report by a hook; a weight that a pass T, IB or W accumulates is reported here, exactly once,
    and not before reports count: until `start`, Megatron is told that more microbatches follow.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._chunk = chunk
        self._held: AbstractContextManager[Any] = nullcontext()
        self._started = False
        self._waiting: list[torch.nn.Parameter] = []

    def hold(self, no_sync: AbstractContextManager[Any]) -> None:
        """Enter Megatron's `no_sync` until `start` or `finish`."""
        self._held = no_sync
        self._held.__enter__()

    def start(self) -> None:
        """From now on gradients are final: report the weights that are complete."""
        self._held.__exit__(None, None, None)
        self._started = True
        for parameter in self._waiting:
            self._report(parameter)

    def complete(self, parameter: torch.nn.Parameter) -> None:
        """A weight outside autograd has received its last contribution."""
        if self._started:
            self._report(parameter)
        else:
            self._waiting.append(parameter)

    def finish(self, synchronise: Callable[..., Any] | None) -> None:
        """The end of the schedule, for a chunk that has not started: by Megatron's aligned start if there is one."""
        if self._started:
            return
        if synchronise is None:
            self.start()
        else:
            self._held.__exit__(None, None, None)
            synchronise(self._chunk.parameters())

    def _report(self, parameter: torch.nn.Parameter) -> None:
        settings = getattr(self._chunk, "ddp_config", None)
        if settings is not None and settings.overlap_grad_reduce:
            self._chunk.param_to_bucket_group[parameter].register_grad_ready(parameter, self._chunk.force_all_reduce)
