"""Maps virtual stages to ranks and chunks, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """Assigns virtual stages to ranks: `stage_of[rank][chunk]` is a stage.

    Raises ValueError unless all rows have the same length and each stage from 0 to p*v-1 appears once.
    """

    stage_of: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        stages = sorted(stage for row in self.stage_of for stage in row)
        if not stages or len({*map(len, self.stage_of)}) > 1 or stages != list(range(self.stages)):
            raise ValueError(
                "placement must have each virtual stage from 0 on once, and equally many, at least 1, on every rank, "
                f"got {self.stage_of}"
            )

    @classmethod
    def round_robin(cls, ranks: int, chunks: int = 1) -> Placement:
        """Chunk c of rank r is stage c*p + r, as in Megatron's interleaved schedule."""
        return cls(tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks)))

    @classmethod
    def v_shape(cls, ranks: int, chunks: int = 2) -> Placement:
        """Chunk 0 of rank r is stage r, and chunk 1 is stage 2p-1-r, so rank 0 holds the first and the last stage."""
        return cls(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks, p."""
        return len(self.stage_of)

    @property
    def chunks(self) -> int:
        """Number of chunks per rank, v."""
        return len(self.stage_of[0])

    @property
    def stages(self) -> int:
        """Number of virtual stages, p*v."""
        return self.ranks * self.chunks

    @cached_property
    def _seat(self) -> dict[int, tuple[int, int]]:
        return {stage: (r, c) for r, row in enumerate(self.stage_of) for c, stage in enumerate(row)}

    def rank_of(self, stage: int) -> int:
        """Rank that holds `stage`."""
        return self._seat[stage][0]

    def chunk_of(self, stage: int) -> int:
        """Index of `stage` among the chunks of its rank."""
        return self._seat[stage][1]

    def vocab_members(self, vocab_ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks that take part in every vocabulary collective if `vocab_ranks` hold the vocabulary rows.

        The members are the ranks with rows; rank 0, which reads token ids; rank p-1, which reads labels and runs the
        loss function; and the ranks of the first and last stage, which receive embedding rows and send the output
        layer's input.
        """
        return tuple(sorted({*vocab_ranks, 0, self.ranks - 1, self.first_rank, self.last_rank}))

    def word_ranks(self, mtp_stage: int | None) -> set[int]:
        """The ranks that receive embedding rows: that of stage 0 and that of `mtp_stage`, if any."""
        return {self.rank_of(stage) for stage in (0, mtp_stage) if stage is not None}

    @property
    def first_rank(self) -> int:
        """Rank of stage 0, which receives the embedding's output."""
        return self.rank_of(0)

    @property
    def last_rank(self) -> int:
        """Rank of the last stage, which produces the output layer's input."""
        return self.rank_of(self.stages - 1)
