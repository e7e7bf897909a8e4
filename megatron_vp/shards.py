"""How many vocabulary rows a rank holds: one answer for the layers and for the cost model."""

from __future__ import annotations


def rows_per_shard(vocab_size: int, count: int) -> int:
    """Rows of a full shard of `vocab_size` rows cut into `count`; the last shards may be shorter or empty."""
    return -(-vocab_size // count)
