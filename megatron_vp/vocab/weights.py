"""Megatron's weight attributes that the vocabulary layers use."""

from __future__ import annotations

import torch
from torch import nn


def main_grad(weight: nn.Parameter) -> torch.Tensor:
    """The buffer that gradients of `weight` accumulate in, of its shape, in any float dtype."""
    return weight.main_grad  # type: ignore[attr-defined]
