"""Defers Megatron's checks of losses and gradients to the end of an iteration.

To check a number for NaN, the host waits until the device has computed it. With Megatron's defaults, the rank that runs
the loss function waits twice per microbatch, and launches no kernels meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

_deferred: list[Callable[[], None]] | None = None


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Inside this context, calls to `validate_result` are only recorded. On exit, the recorded calls run in order.

    The checks still run before the optimizer step. After an exception, no checks run.
    """
    global _deferred
    assert _deferred is None
    _deferred = waiting = []
    try:
        yield
    finally:
        _deferred = None
    for check in waiting:
        check()


def deferring(validate_result: Callable[..., None]) -> Callable[..., None]:
    """Wrap Megatron's `RerunStateMachine.validate_result` so that its checks are deferred inside `deferred_checks`."""

    @wraps(validate_result)
    def deferred(self: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        if _deferred is None:
            validate_result(self, result, *args, **kwargs)
            return
        # Copy the result, because the schedule later scales the loss in place.
        kept = result.detach().clone() if isinstance(result, torch.Tensor) else result
        _deferred.append(partial(validate_result, self, kept, *args, **kwargs))

    return deferred
