"""Tells Megatron's DDP when a chunk's gradients are complete, even if passes accumulate them outside of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class GradientSynchronisation:
    """Controls the gradient synchronisation of one chunk in one iteration, with or without Megatron's DDP.

    Megatron reduces a bucket when all of its parameters have reported that their gradients are ready. Parameters in
    autograd's graph report through a hook. If a pass T, IB or W accumulates the gradient of a weight, this class
    reports that the gradient is ready, exactly once and only after `start`. Before `start`, Megatron does not count
    reports, because it expects further microbatches.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._chunk = chunk
        self._held: AbstractContextManager[Any] = nullcontext()
        self._started = False
        self._waiting: list[torch.nn.Parameter] = []

    def hold(self, no_sync: AbstractContextManager[Any]) -> None:
        """Enter Megatron's context `no_sync`, which `start` or `finish` will leave."""
        self._held = no_sync
        self._held.__enter__()

    def start(self) -> None:
        """Exit `no_sync`, inside which Megatron ignores reports that gradients are ready. Then report to Megatron the
        weights whose gradients are already complete.
        """
        self._held.__exit__(None, None, None)
        self._started = True
        for parameter in self._waiting:
            self._report(parameter)

    def complete(self, parameter: torch.nn.Parameter) -> None:
        """Record that a pass T, IB or W has completed the gradient of a weight."""
        if self._started:
            self._report(parameter)
        else:
            self._waiting.append(parameter)

    def finish(self, synchronise: Callable[..., Any] | None) -> None:
        """Start the gradient synchronisation at the end of the schedule, unless it has already started.

        If Megatron aligns the start between ranks, it provides the function `synchronise`, which this method calls.
        """
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
