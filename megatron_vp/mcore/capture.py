"""Capture, then execute: what a user's `forward_step` would have given the model, without running the model.

The runtime calls `forward_step(data_iterator, probe)`. The probe records the arguments of the call and returns a
placeholder; `forward_step` returns that and the loss function. When the schedule says so, the runtime runs the passes
of that microbatch. Any Megatron script works unmodified.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vp.errors import UserError


class Probe:
    """Stands for the model in one call of `forward_step`; attribute reads go to the model itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record the call."""
        self.calls.append((args, kwargs))
        return torch.zeros((), requires_grad=torch.is_grad_enabled())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class Capture:
    """One microbatch as the user's `forward_step` prepared it on this rank."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_func: Callable[..., Any]
    signature: inspect.Signature

    def argument(self, name: str) -> Any:
        """The value that the model's parameter `name` would have got; None where it was left out."""
        return self._bound().arguments.get(name)

    def keep(self, *names: str) -> None:
        """Forget all arguments but these; the model has been run."""
        self.args, self.kwargs = (), {name: self.argument(name) for name in names if self.argument(name) is not None}

    def given(self, **arguments: Any) -> Capture:
        """The same microbatch with some of the model's arguments replaced."""
        bound = self._bound()
        bound.arguments.update(arguments)
        return replace(self, args=bound.args[1:], kwargs=bound.kwargs)

    def _bound(self) -> inspect.BoundArguments:
        return self.signature.bind_partial(None, *self.args, **self.kwargs)


def capture(forward_step: Callable[..., Any], data_iterator: Any, model: torch.nn.Module) -> Capture:
    """Run the user's `forward_step` against a probe.

    Raises UserError where the data ends, or where the model is not called exactly once, as Megatron's own scripts do.
    """
    probe = Probe(model)
    try:
        _, loss_func = forward_step(data_iterator, probe)
    except StopIteration as end:
        raise UserError(
            "the data ended before the iteration did: the iterator that forward_step reads has no further microbatch; "
            "give the run more data or fewer --train-iters (--train-samples), or let the loader start over"
        ) from end
    if len(probe.calls) != 1:
        raise UserError(
            f"vocabulary parallelism runs the model itself from the arguments of forward_step's one call of it; this "
            f"forward_step called it {len(probe.calls)} times; call the model once or run without --vocab-parallel"
        )
    args, kwargs = probe.calls[0]
    return Capture(args, kwargs, loss_func, _signature(type(unwrap_model(model))))


@cache
def _signature(model: type) -> inspect.Signature:
    return inspect.signature(model.forward)
