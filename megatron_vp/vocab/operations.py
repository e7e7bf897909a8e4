"""What S, T and IB do besides their GEMMs: five operations, in plain PyTorch here and as Triton kernels in `kernels`.

`operations_for` picks by device and dtype. The eager versions serve CPU and fp64 and say what a kernel has to compute;
tests compare both with fp64.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.vocab.statistics import LINEAR, MAX, SUM

ROWS_PER_BLOCK = 1024
"""Tokens whose logits are widened to fp32 at a time: bounds the temporary to 4 bytes x this x V/p."""


class Operations(Protocol):
    """Names ending in `_` write into their first argument. `target_n` is int64 with -1 for "not in this shard"."""

    def exponentiate_(self, logits_nv: torch.Tensor, target_n: torch.Tensor, statistics_3n: torch.Tensor) -> None:
        """Turn logits into E = exp(logit - row maximum), zero in the target's column; fill a, l and (as LINEAR) z."""

    def rescale_(
        self,
        product_nh: torch.Tensor,
        weight_vh: torch.Tensor,
        scale_n: torch.Tensor,
        target_n: torch.Tensor,
        entry_n: torch.Tensor,
    ) -> None:
        """Turn E W into D W: row i becomes scale_i (E W)_i + entry_i W[target_i], rounded once."""

    def weigh(self, rows_nh: torch.Tensor, factor_n: torch.Tensor) -> torch.Tensor:
        """Rows times a factor each, [n, h] in the rows' dtype, rounded once."""

    def add_product_(self, matrix_vh: torch.Tensor, left_nv: torch.Tensor, right_nh: torch.Tensor) -> None:
        """matrix += left^T right."""

    def add_rows_(
        self, matrix_vh: torch.Tensor, row_n: torch.Tensor, source_nh: torch.Tensor, factor_n: torch.Tensor | None
    ) -> None:
        """matrix[row_i] += factor_i source_i for the rows that are not negative; the same bits in every run."""


class EagerOperations:
    """Any device and float dtype; moves the logits several times, and may wait for the device."""

    def exponentiate_(self, logits_nv: torch.Tensor, target_n: torch.Tensor, statistics_3n: torch.Tensor) -> None:
        """See `Operations`."""
        for start in range(0, logits_nv.shape[0], ROWS_PER_BLOCK):
            span = slice(start, start + ROWS_PER_BLOCK)
            logits, column, owned = logits_nv[span], target_n[span].clamp(0)[:, None], target_n[span] >= 0
            wide = logits.to(statistics_3n.dtype)
            largest = wide.amax(-1)
            statistics_3n[MAX, span] = largest
            statistics_3n[LINEAR, span] = torch.where(owned, wide.gather(-1, column).squeeze(-1), 0)
            wide.sub_(largest[:, None]).exp_()
            statistics_3n[SUM, span] = wide.sum(-1)
            kept = torch.where(owned, 0, wide.gather(-1, column).squeeze(-1))
            wide.scatter_(-1, column, kept[:, None])
            if wide is not logits:
                logits.copy_(wide)

    def rescale_(
        self,
        product_nh: torch.Tensor,
        weight_vh: torch.Tensor,
        scale_n: torch.Tensor,
        target_n: torch.Tensor,
        entry_n: torch.Tensor,
    ) -> None:
        """See `Operations`."""
        scaled_nh = product_nh * scale_n[:, None]
        owned_n = (target_n >= 0).nonzero().squeeze(-1)
        scaled_nh[owned_n] += weight_vh[target_n[owned_n]] * entry_n[owned_n, None]
        product_nh.copy_(scaled_nh)

    def weigh(self, rows_nh: torch.Tensor, factor_n: torch.Tensor) -> torch.Tensor:
        """See `Operations`."""
        return (rows_nh * factor_n[:, None]).to(rows_nh.dtype)

    def add_product_(self, matrix_vh: torch.Tensor, left_nv: torch.Tensor, right_nh: torch.Tensor) -> None:
        """See `Operations`. The product is rounded to the operands' dtype before it is added, as Megatron's is."""
        if matrix_vh.dtype == left_nv.dtype:
            matrix_vh.addmm_(left_nv.t(), right_nh)
        else:
            matrix_vh.add_(left_nv.t() @ right_nh)

    def add_rows_(
        self, matrix_vh: torch.Tensor, row_n: torch.Tensor, source_nh: torch.Tensor, factor_n: torch.Tensor | None
    ) -> None:
        """See `Operations`."""
        kept_n = (row_n >= 0).nonzero().squeeze(-1)
        rows_kh = source_nh[kept_n]
        if factor_n is not None:
            rows_kh = rows_kh * factor_n[kept_n, None]
        rows_kh = rows_kh.to(matrix_vh.dtype)
        if matrix_vh.is_cuda:  # there `index_add_` adds equal rows in any order; this sorts them
            matrix_vh.index_put_((row_n[kept_n],), rows_kh, accumulate=True)
        else:
            matrix_vh.index_add_(0, row_n[kept_n], rows_kh)


class ShapeOperations:
    """For fake tensors, which have no contents: allocates what Triton's kernels do, and computes nothing."""

    def exponentiate_(self, logits_nv: torch.Tensor, target_n: torch.Tensor, statistics_3n: torch.Tensor) -> None:
        """See `Operations`."""

    def rescale_(self, product_nh: torch.Tensor, *others: torch.Tensor) -> None:
        """See `Operations`."""

    def weigh(self, rows_nh: torch.Tensor, factor_n: torch.Tensor) -> torch.Tensor:
        """See `Operations`."""
        return torch.empty_like(rows_nh)

    def add_product_(self, matrix_vh: torch.Tensor, left_nv: torch.Tensor, right_nh: torch.Tensor) -> None:
        """See `Operations`."""

    def add_rows_(self, matrix_vh: torch.Tensor, *others: torch.Tensor | None) -> None:
        """See `Operations`."""


def operations_for(tensor: torch.Tensor) -> Operations:
    """Triton's kernels for CUDA tensors in fp32, bf16 and fp16 where Triton is installed, else the eager operations."""
    if isinstance(tensor, FakeTensor):
        return _SHAPES
    fused = tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and _has_triton()
    return _fused() if fused else _EAGER


_EAGER = EagerOperations()
_SHAPES = ShapeOperations()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _fused() -> Operations:
    from megatron_vp.vocab.kernels.fused import FusedOperations  # imports Triton

    return FusedOperations()
