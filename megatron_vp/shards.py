"""How many vocabulary rows a rank holds: one answer for the layers and for the cost model."""

from __future__ import annotations

UNIT = 64
"""Shards are multiples of this many rows: 128 bytes in 16-bit dtypes. Rows of logits then start at an aligned address
whatever the number of ranks, which vector loads and the fast GEMM kernels need (16 bytes at least)."""

SMALL_UNIT = 8
"""The same for shards of fewer than `SMALL_SHARD` rows, where 64 would leave ranks visibly uneven: 16 bytes."""

SMALL_SHARD = 1024


def rows_per_shard(vocab_size: int, count: int) -> int:
    """Rows of a full shard of `vocab_size` rows cut into `count`; the last shards may be shorter or empty."""
    even = -(-vocab_size // count)
    unit = SMALL_UNIT if even < SMALL_SHARD else UNIT
    return min(-(-even // unit) * unit, vocab_size)
