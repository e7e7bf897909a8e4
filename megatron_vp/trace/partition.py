"""How a recorded run had split its model over the pipeline: what its pass times were measured with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Partition:
    """The layers and rows of every part of a run's pipeline; None where they are not known.

    layers: by virtual stage, None also for equally many. vocab_rows: by pipeline rank, tensor ranks together; None also
    without vocabulary parallelism. tensor: ranks that share a pipeline rank's rows.
    """

    layers: tuple[int, ...] | None = None
    vocab_rows: tuple[int, ...] | None = None
    tensor: int = 1

    def document(self) -> dict[str, Any]:
        """For a JSON object, `of` reads it back."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Partition:
        """Of a JSON object with more in it. Raises ValueError or TypeError for values of another kind."""
        found = {}
        for name in ("layers", "vocab_rows"):
            counts = document.get(name)
            found[name] = None if counts is None else tuple(map(int, counts))
        return cls(**found, tensor=int(document.get("tensor", 1)))


UNKNOWN = Partition()
"""Of a run that recorded none."""
