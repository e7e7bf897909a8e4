"""Gives each microbatch its own copy of the rotary positions, for Megatron's `--cuda-graph-impl local`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_positions(model: torch.nn.Module) -> Iterator[None]:
    """Inside this context, the model copies its rotary positions for every forward.

    Without the copies, all microbatches share one tensor of positions. Megatron can then capture the CUDA graph of a
    backward only after the graphs of all forwards, but a pipeline runs its first backward earlier.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None:
        yield
        return
    hook = rotary.register_forward_hook(lambda module, inputs, positions: _copies(positions))
    try:
        yield
    finally:
        hook.remove()


def _copies(positions: Any) -> Any:
    """Return a copy of a tensor, or a tuple whose first tensor is copied."""
    if isinstance(positions, tuple):
        return _copies(positions[0]), *positions[1:]
    return positions.clone()
