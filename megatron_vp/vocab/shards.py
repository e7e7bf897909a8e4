"""Which rows of the vocabulary each rank owns."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.errors import UserError
from megatron_vp.shards import rows_per_shard


@dataclass(frozen=True)
class VocabShards:
    """A vocabulary of `vocab_size` rows cut into `count` contiguous shards, `tensor` of them on each pipeline stage.

    Every shard holds an equal part of the rows, rounded up by `rows_per_shard`, but for the last ones, which are
    shorter or empty. The tensor ranks of a stage hold equally many: Megatron's distributed optimizer gives the ranks of
    a replica parts of one long buffer, and adds up gradients over tensor ranks part by part, so parameters have to lie
    at the same places on all of them. The padded size stays the one that plain Megatron uses, because padding rows take
    part in the softmax and another padding would be another loss.

    Raises:
        UserError: a size that is not positive, and a vocabulary that the tensor ranks cannot share equally.
    """

    vocab_size: int
    count: int
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.count < 1:
            raise UserError(
                f"cannot cut a vocabulary of {self.vocab_size} rows into {self.count} shards: both must be positive"
            )
        if self.count % self.tensor or self.vocab_size % self.tensor:
            raise UserError(
                f"{self.tensor} tensor ranks cannot share {self.vocab_size} rows in {self.count} shards equally: use a "
                "padded vocabulary size that --tensor-model-parallel-size divides"
            )

    @property
    def rows_per_shard(self) -> int:
        """Rows of a full shard."""
        return rows_per_shard(self.vocab_size, self.count)

    def start(self, index: int) -> int:
        """First global row of shard `index`."""
        stage, place = divmod(index, self.tensor)
        first, end = (min(each * self.tensor * self.rows_per_shard, self.vocab_size) for each in (stage, stage + 1))
        return first + place * (end - first) // self.tensor

    def rows(self, index: int) -> int:
        """Number of rows of shard `index`; zero is possible."""
        return self.start(index + 1) - self.start(index)
