"""Rotary positions where Megatron's own CUDA graphs of layers (`--cuda-graph-impl local`) are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_positions(model: torch.nn.Module) -> Iterator[None]:
    """Give a microbatch rotary positions of its own, where Megatron keeps one tensor of them for all.

    Megatron captures no backward before the last forward that takes the same tensor is captured.
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
    """Of a tensor, or of the tensor that a tuple starts with."""
    if isinstance(positions, tuple):
        return _copies(positions[0]), *positions[1:]
    return positions.clone()
