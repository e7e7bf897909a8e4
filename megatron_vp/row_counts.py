"""Number of vocabulary rows per rank: one definition for the layers, the cost model and the commands."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vp.errors import UserError

UNIT = 64
"""Shards are multiples of this many rows: 128 bytes in 16-bit dtypes. Rows of logits then start at an aligned address
whatever the number of ranks, which vector loads and the fast GEMM kernels need (16 bytes at least)."""

SMALL_UNIT = 8
"""The same for shards of fewer than `SMALL_SHARD` rows, for which 64 would leave ranks noticeably uneven: 16 bytes."""

SMALL_SHARD = 1024


def rows_per_shard(vocab_size: int, count: int) -> int:
    """Rows of a full shard of `vocab_size` rows cut into `count`; the last shards may be shorter or empty."""
    even = -(-vocab_size // count)
    unit = SMALL_UNIT if even < SMALL_SHARD else UNIT
    return min(-(-even // unit) * unit, vocab_size)


def check_stage_rows(rows: Sequence[int], vocab_size: int, ranks: int, tensor: int) -> None:
    """Raise UserError for rows by pipeline rank (tensor ranks together) that do not split `vocab_size` rows."""
    said, found = f"--vocab-shards {','.join(map(str, rows))}", sum(rows)
    if len(rows) != ranks:
        raise UserError(
            f"{said} gives rows for {len(rows)} pipeline rank{'s' * (len(rows) != 1)}, and the pipeline has {ranks}: "
            "give one number per rank"
        )
    if min(rows) < 0:
        raise UserError(f"{said} has a negative number of rows: give 0 to a rank that should hold none")
    if not any(rows):
        raise UserError(f"{said} gives rows to no rank: at least one rank must hold the vocabulary's {vocab_size} rows")
    if any(each % tensor for each in rows):
        raise UserError(
            f"{said} cannot be shared equally by the {tensor} tensor ranks of a stage: give multiples of {tensor}"
        )
    if found != vocab_size:
        change = f"add {vocab_size - found}" if found < vocab_size else f"take {found - vocab_size} away"
        raise UserError(f"{said} gives {found} rows, and the padded vocabulary has {vocab_size}: {change}")
