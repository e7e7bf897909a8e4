"""Gives each microbatch its own rotary positions, which Megatron's CUDA graphs (`--cuda-graph-impl local`) need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_positions(model: torch.nn.Module) -> Iterator[None]:
    """Inside this context, the model copies its rotary positions for every forward, instead of sharing one tensor. If
    forwards share a tensor, Megatron captures none of their backwards before the last of these forwards.
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
    """Copy a tensor, or the first tensor of a tuple."""
    if isinstance(positions, tuple):
        return _copies(positions[0]), *positions[1:]
    return positions.clone()
