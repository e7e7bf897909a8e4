"""Parses `--vocab-shards`, which sets how many vocabulary rows each pipeline rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_vp.errors import UserError


class ShardRule(StrEnum):
    """How the number of rows of each rank is chosen."""

    BALANCED = "balanced"
    """Predicted pass times determine each rank's rows, so that all ranks take the same time."""
    EVEN = "even"
    """Every rank has the same number of rows, apart from rounding."""
    ROWS = "rows"
    """The option lists the number of rows of each rank."""


@dataclass(frozen=True)
class ShardChoice:
    """The parsed value of `--vocab-shards`."""

    rule: ShardRule
    rows: tuple[int, ...] | None = None
    """With `ROWS`: rows of each pipeline rank, summed over the tensor ranks of its stage."""

    @classmethod
    def parse(cls, text: object) -> ShardChoice:
        """Read `balanced`, `even` or `ROWS,ROWS,...`; None means `balanced`. Raises UserError."""
        if text is None:
            return cls(ShardRule.BALANCED)
        words = str(text).strip()
        if words in (ShardRule.BALANCED, ShardRule.EVEN):
            return cls(ShardRule(words))
        numbers = [number.strip() for number in words.split(",")]
        if not all(number.removeprefix("-").isdecimal() and len(number) < 20 for number in numbers):
            raise UserError(
                f"--vocab-shards {words} cannot be parsed: use balanced, even, or one number of rows "
                "per pipeline rank such as 64000,64256,0,0"
            )
        return cls(ShardRule.ROWS, tuple(map(int, numbers)))


NEEDS_VOCAB_PARALLEL = (
    "--vocab-shards {vocab_shards} has no effect without --vocab-parallel: add --vocab-parallel, or leave "
    "--vocab-shards out"
)
EVEN_ALONE = (
    "--vocab-shards {vocab_shards} with --pipeline-schedule {pipeline_schedule} is not supported: all ranks "
    "compute the vocabulary layers of a microbatch at the same time, so their shards must be equal; use --vocab-shards "
    "even, or another schedule"
)
