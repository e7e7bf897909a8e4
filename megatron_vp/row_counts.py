"""The number of vocabulary rows per rank, defined once for the layers, the cost model and the commands."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vp.errors import UserError

UNIT = 64
"""Rows per shard are rounded up to a multiple of UNIT, so that in 16-bit dtypes a token's logits fill a multiple of 128
bytes. Vector loads and the fast GEMM kernels need an alignment of at least 16 bytes.
"""

SMALL_UNIT = 8
"""Replaces UNIT for shards of fewer than `SMALL_SHARD` rows, because with multiples of 64, the last shard could be
noticeably smaller than the others. Multiples of 8 rows give an alignment of 16 bytes.
"""

SMALL_SHARD = 1024


def rows_per_shard(vocab_size: int, count: int) -> int:
    """Rows of a full shard if `vocab_size` rows are cut into `count` shards; the last shards may be smaller."""
    even = -(-vocab_size // count)
    unit = SMALL_UNIT if even < SMALL_SHARD else UNIT
    return min(-(-even // unit) * unit, vocab_size)


def check_stage_rows(rows: Sequence[int], vocab_size: int, ranks: int, tensor: int) -> None:
    """Raise UserError unless `rows` has one number per pipeline rank, the numbers add up to `vocab_size`, and each is a
    multiple of `tensor`, the number of tensor ranks in a stage.
    """
    said, found = f"--vocab-shards {','.join(map(str, rows))}", sum(rows)
    if len(rows) != ranks:
        raise UserError(
            f"{said} gives rows for {len(rows)} pipeline rank{'s' * (len(rows) != 1)}, but the pipeline has {ranks}: "
            "give one number per rank"
        )
    if min(rows) < 0:
        raise UserError(f"{said} has a negative number of rows: give 0 for a rank without rows")
    if any(each % tensor for each in rows):
        raise UserError(
            f"{said} cannot be divided equally among the {tensor} tensor ranks of a stage: give multiples of {tensor}"
        )
    if found != vocab_size:
        change = f"add {vocab_size - found}" if found < vocab_size else f"remove {found - vocab_size}"
        raise UserError(f"{said} adds up to {found} rows, but the padded vocabulary has {vocab_size}: {change}")
