"""Records how a run split its model over the pipeline; the run's pass times are valid only for this split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

VOCABULARY = "padded_vocab_size"

SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "seq_length"),
    *("micro_batch_size", "context_parallel_size", VOCABULARY),
)
"""Names of the Megatron arguments on which pass times depend."""


@dataclass(frozen=True)
class Partition:
    """How a run splits its layers over stages and its vocabulary rows over pipeline ranks.

    layers: number of layers by virtual stage; None if unknown, or if all stages have the same number.
    vocab_rows: vocabulary rows of each pipeline rank, over all its tensor ranks; None if unknown or not split.
    tensor: number of tensor ranks that share a pipeline rank's rows.
    sizes: names and values of the arguments in `SIZES`. The run's pass times are valid only for these values.
    """

    layers: tuple[int, ...] | None = None
    vocab_rows: tuple[int, ...] | None = None
    tensor: int = 1
    sizes: tuple[tuple[str, int], ...] = ()

    def document(self) -> dict[str, Any]:
        """The partition as a JSON object, which `of` reads back."""
        return asdict(self) | {"sizes": dict(self.sizes)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Partition:
        """Read a partition from a JSON object, which may have additional entries.

        Raises ValueError, TypeError or AttributeError for a malformed object.
        """
        found = {}
        for name in ("layers", "vocab_rows"):
            counts = document.get(name)
            found[name] = None if counts is None else tuple(map(int, counts))
        sizes = {str(name): int(size) for name, size in document.get("sizes", {}).items()}
        return cls(**found, tensor=int(document.get("tensor", 1)), sizes=tuple(sorted(sizes.items())))


UNKNOWN = Partition()
"""The partition of a run that did not record how it split its model."""
