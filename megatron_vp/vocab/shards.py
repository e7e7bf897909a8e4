"""Defines which rows of the vocabulary each rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from megatron_vp.errors import UserError
from megatron_vp.row_counts import check_stage_rows, rows_per_shard


@dataclass(frozen=True)
class VocabShards:
    """A vocabulary of `vocab_size` rows, split into `count` contiguous shards; each pipeline rank has `tensor` shards.

    `stage_rows` gives the number of rows of each pipeline rank, summed over its tensor ranks; zero is possible. If
    `stage_rows` is None, the vocabulary is split evenly: every shard holds `rows_per_shard` rows (the equal share,
    rounded up), except the last shards, which may be shorter or empty. The padded size is the same as in plain
    Megatron, because padding rows take part in the softmax, and different padding would change the loss.

    The tensor ranks of a stage always hold the same number of rows. With the distributed optimizer, each data-parallel
    rank reduces only its own piece of the gradient buffer. Megatron then adds up some gradients, such as those of
    norms, over the tensor ranks. Each parameter must therefore be at the same offset on all tensor ranks.

    Raises:
        UserError: the tensor ranks cannot share the vocabulary equally, or `stage_rows` do not add up to it.
    """

    vocab_size: int
    count: int
    tensor: int = 1
    stage_rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.vocab_size % self.tensor:
            raise UserError(
                f"a vocabulary of {self.vocab_size} rows cannot be divided among {self.tensor} tensor ranks: use "
                "a padded vocabulary size that is a multiple of --tensor-model-parallel-size"
            )
        if self.stage_rows is not None:
            check_stage_rows(self.stage_rows, self.vocab_size, self.stages, self.tensor)

    @property
    def stages(self) -> int:
        """Number of pipeline ranks."""
        return self.count // self.tensor

    @property
    def rows_per_shard(self) -> int:
        """Number of rows of a full shard in an even split."""
        return rows_per_shard(self.vocab_size, self.count)

    @property
    def by_stage(self) -> tuple[int, ...]:
        """Number of rows of every pipeline rank."""
        return tuple(end - start for start, end in pairwise(self._stage_starts[:-1]))

    @property
    def holders(self) -> tuple[int, ...]:
        """Pipeline ranks that run vocabulary passes. In an even split, these include ranks with empty shards."""
        return tuple(stage for stage in range(self.stages) if self.stage_rows is None or self.stage_rows[stage])

    @property
    def alike(self) -> bool:
        """Whether all shards have the same number of rows."""
        return len({self.rows(index) for index in range(self.count)}) == 1

    def start(self, index: int) -> int:
        """First global row of shard `index`."""
        stage, place = divmod(index, self.tensor)
        first, end = self._stage_starts[stage : stage + 2]
        return first + place * (end - first) // self.tensor

    def rows(self, index: int) -> int:
        """Number of rows of shard `index`; zero is possible."""
        return self.start(index + 1) - self.start(index)

    @cached_property
    def _stage_starts(self) -> list[int]:
        """First row of every stage, and twice the end of the vocabulary."""
        rows = self.stage_rows or (self.tensor * self.rows_per_shard,) * self.stages
        return [*(min(start, self.vocab_size) for start in accumulate(rows, initial=0)), self.vocab_size]
