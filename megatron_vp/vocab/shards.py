"""Which rows of the vocabulary each rank owns."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.errors import UserError
from megatron_vp.shards import rows_per_shard


@dataclass(frozen=True)
class VocabShards:
    """A vocabulary of `vocab_size` rows cut into `count` contiguous shards.

    Every shard holds an equal part of the rows, rounded up by `rows_per_shard`, but for the last ones, which are
    shorter or empty. The padded size stays the one that plain Megatron uses, because padding rows take part in the
    softmax and another padding would be another loss.

    Raises:
        UserError: a size that is not positive.
    """

    vocab_size: int
    count: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.count < 1:
            raise UserError(
                f"cannot cut a vocabulary of {self.vocab_size} rows into {self.count} shards: both must be positive"
            )

    @property
    def rows_per_shard(self) -> int:
        """Rows of a full shard."""
        return rows_per_shard(self.vocab_size, self.count)

    def start(self, index: int) -> int:
        """First global row of shard `index`."""
        return min(index * self.rows_per_shard, self.vocab_size)

    def rows(self, index: int) -> int:
        """Number of rows of shard `index`; zero is possible."""
        return self.start(index + 1) - self.start(index)
