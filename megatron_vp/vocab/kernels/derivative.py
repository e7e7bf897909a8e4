"""What T does besides its GEMMs, and C1 of vocab-2: rows of D made of E, each in one launch (Triton)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_vp.vocab.derivative import Derivative
from megatron_vp.vocab.operations import smallest_scale

BLOCK = 1024
"""Elements of a row that a program handles at a time."""


@triton.jit
def _row(token, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight):
    """The target's column, c and e of one token."""
    top, total = tl.load(total_largest + token), tl.load(total_sum + token)
    slope = 1.0 + 2.0 * z_loss * (top + tl.log(total))
    scale = tl.exp(tl.load(largest + token) - top) / total * slope
    entry = tl.exp(tl.load(target_logit + token) - top) / total * slope - target_weight
    return tl.load(target + token), scale, entry


@triton.jit
def _rescale(
    product, weight, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, hidden,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, scale, entry = _row(token, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < hidden
    value = tl.load(product + token * hidden + lane, mask=inside).to(tl.float32) * scale
    if own >= 0:
        value += tl.load(weight + own * hidden + lane, mask=inside).to(tl.float32) * entry
    tl.store(product + token * hidden + lane, value.to(product.dtype.element_ty), mask=inside)


def rescale_(product_nh: torch.Tensor, weight_vh: torch.Tensor, derivative: Derivative) -> None:
    """E W to a shard's part of dX / g, in place: row i becomes c_i (E W)_i + e_i W[target_i]; once rounded.

    Args:
        product_nh: [n, h] in the model's dtype, contiguous. Overwritten.
        weight_vh: [V/p, h] in the model's dtype, contiguous.
        derivative: c and e, from vectors in fp32.
    """
    tokens, hidden = product_nh.shape
    assert product_nh.is_contiguous() and weight_vh.is_contiguous()
    grid = (tokens, triton.cdiv(hidden, BLOCK))
    _rescale[grid](product_nh, weight_vh, *_terms(derivative), hidden, BLOCK=BLOCK, enable_fp_fusion=True)


@triton.jit
def _enter_targets(
    exp, stride, columns, x, row_gradient, result, smallest,
    largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, hidden,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, scale, entry = _row(token, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight)
    left = scale
    if own >= 0:
        taken = tl.abs(scale) < smallest
        left = tl.where(taken, 1.0, scale)
        if part == 0:
            row = exp + token * stride
            if taken:
                for start in range(0, columns, BLOCK):
                    here = start + tl.arange(0, BLOCK)
                    value = tl.load(row + here, mask=here < columns, other=0.0).to(tl.float32) * scale
                    value = tl.where(here == own, entry, value)
                    tl.store(row + here, value.to(exp.dtype.element_ty), mask=here < columns)
            else:
                tl.store(row + own, (entry / scale).to(exp.dtype.element_ty))
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < hidden
    value = tl.load(x + token * hidden + lane, mask=inside).to(tl.float32) * (left * tl.load(row_gradient + token))
    tl.store(result + token * hidden + lane, value.to(result.dtype.element_ty), mask=inside)


def enter_targets_(
    exp_nv: torch.Tensor, x_nh: torch.Tensor, row_gradient_n: torch.Tensor, derivative: Derivative
) -> torch.Tensor:
    """Give E the targets' entries and return X' [n, h], so that E'^T X' = D^T (g X); `Operations.enter_targets_`.

    Args:
        exp_nv: E [n, V/p] in the model's dtype, rows contiguous. An element of each row whose target is here is
            written, and a whole row where c is too small to leave it to X.
        x_nh: [n, h] in the model's dtype, contiguous.
        row_gradient_n: g, fp32 [n].
        derivative: c and e, from vectors in fp32.
    """
    tokens, hidden = x_nh.shape
    assert exp_nv.stride(1) == 1 and x_nh.is_contiguous()
    result, smallest = torch.empty_like(x_nh), smallest_scale(exp_nv.dtype)
    _enter_targets[(tokens, triton.cdiv(hidden, BLOCK))](
        exp_nv, exp_nv.stride(0), exp_nv.shape[1], x_nh, row_gradient_n.contiguous(), result, smallest,
        *_terms(derivative), hidden,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )  # fmt: skip
    return result


def _terms(derivative: Derivative) -> tuple[Any, ...]:
    """A derivative as `_row` takes it."""
    total = derivative.total
    vectors = derivative.largest_n, derivative.target_n, derivative.target_logit_n, total.max_n, total.sum_n
    assert all(vector.is_contiguous() for vector in vectors)
    return *vectors, derivative.loss.z_loss, derivative.target_weight
