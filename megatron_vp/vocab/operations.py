"""Chooses the version of the operations that S, T, IB, TOKENS and C1 use; `EagerOperations` documents them."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.vocab.eager import EagerOperations, ShapeOperations


def operations_for(tensor: torch.Tensor) -> EagerOperations:
    """Choose the operations by the type, device and dtype of a tensor."""
    if isinstance(tensor, FakeTensor):
        return _SHAPES
    fused = tensor.is_cuda and tensor.dtype != torch.float64 and _has_triton()
    return _fused() if fused else _EAGER


_EAGER = EagerOperations()
_SHAPES = ShapeOperations()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _fused() -> EagerOperations:
    from megatron_vp.vocab.kernels.fused import FusedOperations  # imports Triton

    return FusedOperations()


def main_grad(weight: nn.Parameter) -> torch.Tensor:
    """Megatron's buffer for gradients of `weight`; it has the weight's shape and any float dtype."""
    return weight.main_grad  # type: ignore[attr-defined]
