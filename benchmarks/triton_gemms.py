"""The Triton GEMMs of the fused ways (`benchmarks/candidates.py`), with what belongs to S and T inside them."""

import triton
import triton.language as tl


@triton.jit
def _place(tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile of this program: a few rows of tiles together, so that operands are met again in L2."""
    number = tl.program_id(0)
    group = number // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = number % (GROUP * tiles_n)
    return group * GROUP + inside % height, inside // height


@triton.jit
def logits(
    x, weight, result, largest, total, tokens, columns, hidden,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """X W^T, and of every row of a tile the largest logit and the sum of exponentials."""
    tile_m, tile_n = _place(tl.cdiv(tokens, M), tl.cdiv(columns, N), GROUP)
    token, column, depth = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N), tl.arange(0, K)
    token_safe, column_safe = (token % tokens).to(tl.int64), (column % columns).to(tl.int64)
    product = tl.zeros((M, N), tl.float32)
    for start in range(0, hidden, K):
        inside = start + depth < hidden
        left = tl.load(x + token_safe[:, None] * hidden + start + depth[None, :], mask=inside[None, :], other=0.0)
        right = tl.load(
            weight + column_safe[None, :] * hidden + start + depth[:, None], mask=inside[:, None], other=0.0
        )
        product = tl.dot(left, right, product)
    rounded = product.to(result.dtype.element_ty)
    here = (token < tokens)[:, None] & (column < columns)[None, :]
    tl.store(result + token.to(tl.int64)[:, None] * columns + column[None, :], rounded, mask=here)
    if STATISTICS:
        logit = tl.where((column < columns)[None, :], rounded.to(tl.float32), -float("inf"))
        largest_of_tile = tl.max(logit, 1)
        total_of_tile = tl.sum(tl.exp(logit - largest_of_tile[:, None]), 1)
        tl.store(largest + tile_n * tokens + token, largest_of_tile, mask=token < tokens)
        tl.store(total + tile_n * tokens + token, total_of_tile, mask=token < tokens)


@triton.jit
def weight_gradient(
    kept, largest, target, weighed, main_grad, tokens, columns, hidden,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """main_grad += E^T X', with E made of logits as they are loaded, but for the targets' entries."""
    tile_m, tile_n = _place(tl.cdiv(columns, M), tl.cdiv(hidden, N), GROUP)
    column, place, step = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N), tl.arange(0, K)
    product = tl.zeros((M, N), tl.float32)
    for start in range(0, tokens, K):
        token = start + step
        inside = token < tokens
        address = token.to(tl.int64)
        logit = tl.load(
            kept + address[:, None] * columns + column[None, :],
            mask=inside[:, None] & (column < columns)[None, :],
            other=-float("inf"),
        )
        row_maximum = tl.load(largest + token, mask=inside, other=0.0)
        own = tl.load(target + token, mask=inside, other=-1)
        logit = logit.to(tl.float32)
        exp = tl.where(own[:, None] == column[None, :], logit, tl.exp(logit - row_maximum[:, None]))
        exp = exp.to(weighed.dtype.element_ty)
        right = tl.load(
            weighed + address[:, None] * hidden + place[None, :],
            mask=inside[:, None] & (place < hidden)[None, :],
            other=0.0,
        )
        product = tl.dot(tl.trans(exp), right, product)
    here = (column < columns)[:, None] & (place < hidden)[None, :]
    address = main_grad + column.to(tl.int64)[:, None] * hidden + place[None, :]
    tl.store(address, tl.load(address, mask=here, other=0.0) + product, mask=here)
