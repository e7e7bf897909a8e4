"""Triton kernel for the collective TOKENS: finds the owner of each position of a microbatch in one launch.

The positions are sorted by token id, and thus by owner. A position's place in this order is the number of positions
that come before it. Each program computes the places of a few positions. The kernel makes n^2 comparisons, but needs
neither a sort with many launches nor atomics. On an H100, the comparisons take about 80 us for `MOST_TOKENS` tokens.
This time is estimated from an instruction count; the kernel has not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_TOKENS = 16384
"""Largest microbatch, in tokens, that the kernel sorts. With more tokens, the comparisons would take longer than the
launches that they save.
"""

QUERIES = 16
"""Number of positions whose places a program computes, or of owners whose positions it counts."""

CHUNK = 512
"""Number of positions that a program compares with its own positions at a time."""

_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _key(tokens, position, count, spans, owners, steps, vocab_size):
    """Return each position's sort key: its token id if a shard of this pipeline owns the token, and a larger number
    otherwise. A binary search finds this pipeline's last shard that starts at or before the token. If another
    pipeline's shard owns the token, the shard found is empty or ends before the token.
    """
    inside, shards = position < count, owners - 2
    token = tl.load(tokens + position, mask=inside, other=0)
    word = tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int32)
    shard = tl.zeros_like(position)
    for step in range(steps):
        reached = shard + (1 << (steps - 1 - step))
        start = tl.load(spans + reached, mask=reached < shards, other=_LAST).to(tl.int32)
        shard = tl.where(start <= word, reached, shard)
    first, beyond = tl.load(spans + shard).to(tl.int32), tl.load(spans + owners + shard).to(tl.int32)
    key = word + tl.where(word != token, 2 * vocab_size, tl.where((word >= first) & (word < beyond), 0, vocab_size))
    return tl.where(inside, key, _LAST)


@triton.jit(do_not_specialize=["count", "owners", "steps", "vocab_size"])
def _sort_by_owner(
    order, counts, tokens, count, spans, owners, steps, vocab_size,
    QUERIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(count, QUERIES)
    block = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    found = tl.zeros((QUERIES, CHUNK), tl.int32)
    if block < blocks:
        # For each key of this program, count the keys that sort before that key: smaller keys in all chunks, and equal
        # keys in earlier chunks.
        own = block * QUERIES + tl.arange(0, QUERIES)
        key = _key(tokens, own, count, spans, owners, steps, vocab_size)
        first = block * QUERIES // CHUNK * CHUNK
        for start in range(0, count, CHUNK):
            other = _key(tokens, start + lane, count, spans, owners, steps, vocab_size)
            bound = key + tl.where(start < first, 1, 0)
            found += (other[None, :] < bound[:, None]).to(tl.int32)
        # Also count equal keys at earlier positions of the same chunk.
        other = _key(tokens, first + lane, count, spans, owners, steps, vocab_size)
        found += ((other[None, :] == key[:, None]) & ((first + lane)[None, :] < own[:, None])).to(tl.int32)
        tl.store(order + tl.sum(found, 1), own.to(tl.int64), mask=own < count)
    else:
        owner = (block - blocks) * QUERIES + tl.arange(0, QUERIES)
        known = owner < owners
        lowest = tl.load(spans + owner, mask=known, other=0).to(tl.int32)
        beyond = tl.load(spans + owners + owner, mask=known, other=0).to(tl.int32)
        for start in range(0, count, CHUNK):
            other = _key(tokens, start + lane, count, spans, owners, steps, vocab_size)
            found += ((other[None, :] >= lowest[:, None]) & (other[None, :] < beyond[:, None])).to(tl.int32)
        tl.store(counts + owner, tl.sum(found, 1).to(tl.int64), mask=known)


def sort_by_owner_(
    order_n: torch.Tensor, counts: torch.Tensor, tokens_n: torch.Tensor, spans: torch.Tensor, vocab_size: int
) -> None:
    """Sort the positions of a microbatch by owner, token id and position; see `Operations.sort_by_owner_`.

    All tensors are contiguous. n is at most `MOST_TOKENS`, and V is below 2^31 / 3.
    """
    count, owners = len(tokens_n), len(counts)
    assert takes(tokens_n, vocab_size) and tokens_n.is_contiguous() and spans.is_contiguous() and counts.is_contiguous()
    # A binary search among `owners - 2` shards takes this many steps. The last two entries of `counts` are not shards.
    steps = (owners - 3).bit_length()
    _sort_by_owner[(triton.cdiv(count, QUERIES) + triton.cdiv(owners, QUERIES),)](
        order_n, counts, tokens_n, count, spans, owners, steps, vocab_size,
        QUERIES=QUERIES,
        CHUNK=CHUNK,
        num_warps=8,
    )  # fmt: skip


def takes(tokens_n: torch.Tensor, vocab_size: int) -> bool:
    """Whether the kernel supports this number of tokens and this vocabulary size."""
    return len(tokens_n) <= MOST_TOKENS and 3 * vocab_size < 2**31
