"""What S and T do with whole rows of h numbers, each in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of a row that a program handles at a time."""


@triton.jit
def _rescale(product, weight, scale, target, entry, hidden, BLOCK: tl.constexpr):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < hidden
    value = tl.load(product + token * hidden + lane, mask=inside).to(tl.float32) * tl.load(scale + token)
    own = tl.load(target + token)
    if own >= 0:
        value += tl.load(weight + own * hidden + lane, mask=inside).to(tl.float32) * tl.load(entry + token)
    tl.store(product + token * hidden + lane, value.to(product.dtype.element_ty), mask=inside)


def rescale_(
    product_nh: torch.Tensor,
    weight_vh: torch.Tensor,
    scale_n: torch.Tensor,
    target_n: torch.Tensor,
    entry_n: torch.Tensor,
) -> None:
    """E W to a shard's part of dX / g, in place: row i becomes c_i (E W)_i + entry_i W[target_i]; once rounded.

    Args:
        product_nh: [n, h] in the model's dtype, contiguous. Overwritten.
        weight_vh: [V/p, h] in the model's dtype, contiguous.
        scale_n, entry_n: fp32 [n], the factor c and the target's entry of D.
        target_n: int64 [n], -1 where the target belongs to another shard.
    """
    tokens, hidden = product_nh.shape
    assert product_nh.is_contiguous() and weight_vh.is_contiguous()
    grid = (tokens, triton.cdiv(hidden, BLOCK))
    _rescale[grid](product_nh, weight_vh, scale_n, target_n, entry_n, hidden, BLOCK=BLOCK)


@triton.jit
def _weigh(rows, factor, result, hidden, BLOCK: tl.constexpr):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    inside = lane < hidden
    value = tl.load(rows + token * hidden + lane, mask=inside).to(tl.float32) * tl.load(factor + token)
    tl.store(result + token * hidden + lane, value.to(result.dtype.element_ty), mask=inside)


def weigh(rows_nh: torch.Tensor, factor_n: torch.Tensor) -> torch.Tensor:
    """Rows times a factor each, [n, h] in the rows' dtype; the product is rounded once, from fp32."""
    tokens, hidden = rows_nh.shape
    assert rows_nh.is_contiguous()
    result = torch.empty_like(rows_nh)
    _weigh[(tokens, triton.cdiv(hidden, BLOCK))](rows_nh, factor_n, result, hidden, BLOCK=BLOCK)
    return result


@triton.jit
def _add_rows(matrix, row, order, source, factor, count, hidden, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    place, part = tl.program_id(0), tl.program_id(1)
    own = tl.load(row + place)
    before = tl.load(row + place - 1, mask=place > 0, other=-1)
    # The first of equal rows adds them all, in their order: no atomics, and the same bits every time.
    if (own != before) & (own >= 0):
        lane = part * BLOCK + tl.arange(0, BLOCK)
        inside = lane < hidden
        total = tl.zeros((BLOCK,), tl.float32)
        following = own
        while following == own:
            token = tl.load(order + place)
            piece = tl.load(source + token * hidden + lane, mask=inside, other=0.0).to(tl.float32)
            if WEIGHED:
                piece = piece * tl.load(factor + token)
            total += piece
            place += 1
            following = tl.load(row + place, mask=place < count, other=-1)
        address = matrix + own * hidden + lane
        total += tl.load(address, mask=inside, other=0.0).to(tl.float32)
        tl.store(address, total.to(matrix.dtype.element_ty), mask=inside)


def add_rows_(
    matrix_vh: torch.Tensor, row_n: torch.Tensor, source_nh: torch.Tensor, factor_n: torch.Tensor | None
) -> None:
    """matrix[row_i] += factor_i * source_i, deterministic whatever rows repeat; sums in fp32.

    Args:
        matrix_vh: [V/p, h] in any float dtype, contiguous: `main_grad`.
        row_n: int64 [n]; a negative row is left out.
        source_nh: [n, h] in any float dtype, contiguous.
        factor_n: fp32 [n], or None for ones.
    """
    count, hidden = source_nh.shape
    assert matrix_vh.is_contiguous() and source_nh.is_contiguous()
    if not count:
        return
    sorted_n, order_n = row_n.sort(stable=True)
    weighed = factor_n is not None
    grid = (count, triton.cdiv(hidden, BLOCK))
    factor = factor_n if weighed else sorted_n
    _add_rows[grid](matrix_vh, sorted_n, order_n, source_nh, factor, count, hidden, BLOCK=BLOCK, WEIGHED=weighed)
