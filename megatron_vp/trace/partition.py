"""Records how a run split its vocabulary over the pipeline, and the sizes on which its pass times depend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "seq_length"),
    *("micro_batch_size", "context_parallel_size", "padded_vocab_size"),
)
"""Names of the Megatron arguments on which pass times depend."""


@dataclass(frozen=True)
class Partition:
    """How a run splits its vocabulary rows over pipeline ranks.

    vocab_rows: vocabulary rows of each pipeline rank, over all its tensor ranks; None if unknown or not split.
    sizes: names and values of the arguments in `SIZES`. The run's pass times are valid only for these values.
    """

    vocab_rows: tuple[int, ...] | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def document(self) -> dict[str, Any]:
        """The partition as a JSON object, which `of` reads back."""
        return {"vocab_rows": self.vocab_rows, "sizes": dict(self.sizes)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Partition:
        """Read a partition from a JSON object, which may have additional entries.

        Raises ValueError, TypeError or AttributeError for a malformed object.
        """
        rows = document.get("vocab_rows")
        sizes = {str(name): int(size) for name, size in document.get("sizes", {}).items()}
        return cls(None if rows is None else tuple(map(int, rows)), tuple(sorted(sizes.items())))


UNKNOWN = Partition()
"""The partition of a run that did not record how it split its model."""
