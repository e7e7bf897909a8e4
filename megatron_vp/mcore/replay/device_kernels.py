"""Replaces operations that run as one kernel on a GPU. On a CPU, PyTorch splits each of them into several operations,
which save more tensors for the backward.

A replay with --shapes-only runs on a CPU but counts memory for a GPU. Inside `device_kernels`, the replacements save
the same tensors as the GPU kernels: a norm saves its input, dropout saves a mask of one byte per element, and attention
saves queries, keys, values, result and log-sum-exp. Results are zeros.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron_vp.mcore.settled import process


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


class _Norm(torch.autograd.Function):
    """RMSNorm or LayerNorm over the last dimension. Saves its input and, in fp32, the statistics of each row."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        count = 1 if bias is None else 2
        context.save_for_backward(rows, weight, rows.new_zeros((*rows.shape[:-1], count), dtype=torch.float32))
        context.has_bias = bias is not None
        return _zeros(rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, _ = context.saved_tensors
        return _zeros(rows), _zeros(weight), _zeros(weight) if context.has_bias else None


class _Attention(torch.autograd.Function):
    """Flash attention for queries [b, heads, s, d], keys [b, groups, s, d] and values [b, groups, s, dv]. The result
    [b, heads, s, dv] is laid out in memory as [s, b, heads, dv].
    """

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, positions, _ = query.shape
        result = query.new_zeros(positions, batch, heads, value.shape[-1]).permute(1, 2, 0, 3)
        context.save_for_backward(query, key, value, result, query.new_zeros(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(each) for each in context.saved_tensors[:3])


def _norm(self: Any, rows: torch.Tensor) -> torch.Tensor:
    if process.counts_engine:
        # Like Transformer Engine, save a contiguous copy: a view would keep the entire storage behind it alive.
        rows = rows.contiguous()
    return _Norm.apply(rows, self.weight, getattr(self, "bias", None))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _Attention.apply(query, key, value)


@contextlib.contextmanager
def device_kernels() -> Iterator[None]:
    """Inside this context, norms, dropout and fused attention save the same tensors as on a GPU. Results are zeros."""
    with (
        mock.patch.object(torch.nn.RMSNorm, "forward", _norm),
        mock.patch.object(torch.nn.LayerNorm, "forward", _norm),
        mock.patch.object(torch.nn.functional, "dropout", _dropout),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention),
    ):
        yield


def _halved(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gated(rows: torch.Tensor, *_: Any) -> torch.Tensor:
        return rows.new_zeros((*rows.shape[:-1], rows.shape[-1] // 2))

    return gated


def _like_input(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def like_input(first: torch.Tensor, second: torch.Tensor, *third: torch.Tensor) -> torch.Tensor:
        # The arguments are (bias, y), (g, bias, y), (g, y) or (g, y, bias). The result has the shape of y, the largest
        # argument.
        return _zeros(max((first, second, *third), key=torch.Tensor.numel))

    return like_input
