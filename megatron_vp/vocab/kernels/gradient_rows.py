"""Triton kernels that apply the factors c and the entries e (`megatron_vp.vocab.loss`) to E and X, or to E W.

One kernel is launched for the weight gradient, in T, and one for the input gradient, in T (vocab-1) or C1 (vocab-2). If
the loss depends on entropies, one kernel replaces both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_vp.vocab.loss import Derivative, smallest_scale

BLOCK = 1024
"""Number of elements of a row of E W that a program handles."""

TILE = (4, 512)
"""Number of tokens and number of elements per row of X that a program handles in T."""

CHUNK = 4096
"""Number of elements of a row of E that a program handles in T, `BLOCK` at a time."""

# Vectors with one number per token. They are rows of packed tensors, so their alignment varies with the number of
# tokens. Triton must not compile separate kernels for aligned vectors.
_VECTORS = ["largest", "target", "target_logit", "total_largest", "total_sum"]


@triton.jit
def _row(token, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap):
    """Compute the target's column, the factor c and the entry e of each token; e is 0 if the shard does not own the
    target.
    """
    top, total = tl.load(total_largest + token), tl.load(total_sum + token)
    own = tl.load(target + token)
    slope = 1.0 + 2.0 * z_loss * (top + tl.log(total))
    scale = tl.exp(tl.load(largest + token) - top) / total * slope
    picked = tl.load(target_logit + token)
    entry = tl.exp(picked - top) / total * slope - target_weight
    if inverse_cap is not None:
        entry *= 1.0 - (picked * inverse_cap) * (picked * inverse_cap)
    return own, scale, tl.where(own >= 0, entry, 0.0)


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _rescale(
    product, weight, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap,
    hidden, BLOCK: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < hidden
    value = tl.load(product + token * hidden + lane, mask=inside).to(tl.float32)
    own, scale, entry = _row(
        token, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap
    )
    word = tl.load(weight + own * hidden + lane, mask=lane < tl.where(own >= 0, hidden, 0), other=0.0).to(tl.float32)
    value = value * scale + word * entry
    tl.store(product + token * hidden + lane, value.to(product.dtype.element_ty), mask=inside)


def rescale_(product_nh: torch.Tensor, weight_vh: torch.Tensor, derivative: Derivative) -> None:
    """Turn E W into (D + u) W, in place; see `EagerOperations.rescale_`. Vectors are fp32."""
    tokens, hidden = product_nh.shape
    assert product_nh.is_contiguous() and weight_vh.is_contiguous()
    _rescale[(tokens, triton.cdiv(hidden, BLOCK))](
        product_nh, weight_vh, *_terms(derivative), hidden, BLOCK=BLOCK, enable_fp_fusion=True
    )


@triton.jit
def _rescale_if_taken(
    exp, stride, columns, chunk, token, tokens, smallest,
    largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap,
    CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """If c is too small to be applied to X, multiply a part of a row of E by c and replace the target's entry by e."""
    known = tl.minimum(token, tokens - 1)
    own, scale, entry = _row(
        known, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap
    )
    if (own >= 0) & (tl.abs(scale) < smallest) & (token < tokens):
        row = exp + token.to(tl.int64) * stride
        for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, columns), STEP):
            lane = start + tl.arange(0, STEP)
            value = tl.load(row + lane, mask=lane < columns, other=0.0).to(tl.float32) * scale
            value = tl.where(lane == own, entry, value)
            tl.store(row + lane, value.to(exp.dtype.element_ty), mask=lane < columns)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_VECTORS)
def _enter_targets(
    exp, stride, columns, x, row_gradient, result, smallest, tokens,
    largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    group, part = tl.program_id(0), tl.program_id(1)
    token = group * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    known = tl.minimum(token, tokens - 1)
    parts = tl.cdiv(hidden, BLOCK)
    if part < parts:
        # Load everything first, so that loads overlap. Then compute X' = c g X, and enter the targets' entries into E.
        lane = part * BLOCK + tl.arange(0, BLOCK)
        here = inside[:, None] & (lane < hidden)[None, :]
        place = token.to(tl.int64)[:, None] * hidden + lane[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        gradient = tl.load(row_gradient + token, mask=inside, other=0.0)
        own, scale, entry = _row(
            known, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap
        )
        taken = (own >= 0) & (tl.abs(scale) < smallest)
        left = tl.where(taken, 1.0, scale)
        tl.store(result + place, (value * (left * gradient)[:, None]).to(result.dtype.element_ty), mask=here)
        if part == 0:
            address = exp + token.to(tl.int64) * stride + own
            tl.store(address, (entry / left).to(exp.dtype.element_ty), mask=inside & (own >= 0) & (taken == 0))
    else:
        # If this shard owns a token's target and c is too small to be applied to X, the token's row of E is multiplied
        # by c. In fp16, c always counts as too small. In other dtypes, c is hardly ever too small. Each program handles
        # a part of the columns.
        own, scale, entry = _row(
            known, largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap
        )
        taken = inside & (own >= 0) & (tl.abs(scale) < smallest)
        if tl.max(taken.to(tl.int32), 0) > 0:
            for each in range(0, ROWS):
                _rescale_if_taken(
                    exp, stride, columns, part - parts, group * ROWS + each, tokens, smallest,
                    largest, target, target_logit, total_largest, total_sum, z_loss, target_weight, inverse_cap,
                    CHUNK, STEP,
                )  # fmt: skip


def enter_targets_(
    exp_nv: torch.Tensor, x_nh: torch.Tensor, token_loss_grad_n: torch.Tensor, derivative: Derivative
) -> torch.Tensor:
    """Enter the targets into E and return X', so that E'^T X' = (D + u)^T (g X); see `EagerOperations.enter_targets_`.

    X and each row of E are contiguous; vectors are fp32.
    """
    (tokens, hidden), columns = x_nh.shape, exp_nv.shape[1]
    assert exp_nv.stride(1) == 1 and x_nh.is_contiguous()
    result = torch.empty_like(x_nh)
    rows, block = TILE
    # If rows of X are not aligned, Triton 3.6 by default uses 56 registers and spills one, so 64 are allowed.
    options = {"maxnreg": 64} if hidden % 16 else {}
    _enter_targets[(triton.cdiv(tokens, rows), triton.cdiv(hidden, block) + triton.cdiv(columns, CHUNK))](
        exp_nv, exp_nv.stride(0), columns, x_nh, token_loss_grad_n.contiguous(), result,
        smallest_scale(exp_nv.dtype), tokens, *_terms(derivative), hidden,
        ROWS=rows,
        BLOCK=block,
        CHUNK=CHUNK,
        STEP=BLOCK,
        enable_fp_fusion=True,
        **options,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=[*_VECTORS, "total_tilt"])
def _enter_derivative(
    exp, stride, columns, gradients, tokens,
    largest, target, target_logit, total_largest, total_sum, total_tilt, inverse_cap, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = exp + token.to(tl.int64) * stride, lane < columns
    g, h = tl.load(gradients + token), tl.load(gradients + tokens + token)
    top, total, own = tl.load(total_largest + token), tl.load(total_sum + token), tl.load(target + token)
    mean, most = tl.load(total_tilt + token) / total, tl.load(largest + token)
    value = tl.load(row + lane, mask=inside, other=0.0).to(tl.float32)
    below = tl.maximum(tl.log(value), -800.0)  # The logarithm of zero is -inf, whose product with zero would be NaN.
    picked = tl.load(target_logit + token)
    value *= (g + h * (mean + (top - most) - below)) * (tl.exp(most - top) / total)
    entry = tl.exp(picked - top) / total * (g + h * (mean + (top - picked))) - g
    if inverse_cap is not None:
        logit = (most + below) * inverse_cap
        value *= 1.0 - logit * logit
        entry *= 1.0 - (picked * inverse_cap) * (picked * inverse_cap)
    tl.store(row + lane, tl.where(lane == own, entry, value).to(exp.dtype.element_ty), mask=inside)


def enter_derivative_(exp_nv: torch.Tensor, gradients_2n: torch.Tensor, derivative: Derivative) -> None:
    """Turn E into the derivative of the training loss; see `EagerOperations.enter_derivative_`. Vectors are fp32."""
    tokens, columns = exp_nv.shape
    assert exp_nv.stride(1) == 1
    *vectors, _, _, inverse_cap = _terms(derivative)
    _enter_derivative[(tokens, triton.cdiv(columns, BLOCK))](
        exp_nv, exp_nv.stride(0), columns, gradients_2n.contiguous(), tokens, *vectors, derivative.total.tilt_n,
        inverse_cap, BLOCK=BLOCK, enable_fp_fusion=True,
    )  # fmt: skip


def _terms(derivative: Derivative) -> tuple[Any, ...]:
    """Return a derivative's fields as arguments of `_row`."""
    total = derivative.total
    vectors = derivative.largest_n, derivative.target_n, derivative.target_logit_n, total.max_n, total.sum_n
    assert all(vector.is_contiguous() for vector in vectors)
    inverse_cap = 1.0 / derivative.softcap if derivative.softcap else None
    return *vectors, derivative.loss.z_loss, derivative.target_weight, inverse_cap
