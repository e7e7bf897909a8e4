"""Access to `main_grad`, the gradient buffer that Megatron attaches to a weight."""

from __future__ import annotations

import torch
from torch import nn


def main_grad(weight: nn.Parameter) -> torch.Tensor:
    """The buffer in which gradients of `weight` accumulate; it has the weight's shape and any float dtype."""
    return weight.main_grad  # type: ignore[attr-defined]
