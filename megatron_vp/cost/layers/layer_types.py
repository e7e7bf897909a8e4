"""Counts the layers of every stage by their kind (see `layer_operations.LAYERS`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_vp.cost.layers.layer_operations import LAYERS
from megatron_vp.cost.layers.shapes import Job, ModelShape


def type_of(letter: str) -> str:
    """The kind of layer that the cost model uses for a letter of a pattern.

    Unknown letters, such as Mamba (M) and other forms of latent attention (D, +), are counted as plain attention.
    """
    return letter if letter in LAYERS else "*"


Counts = Mapping[str, int]
"""The number of layers of each kind."""


class StageLayers(NamedTuple):
    """Layers of one virtual stage by kind: all layers, and those whose matrix products run in 16 bits (`wide`)."""

    counts: Counts
    wide: Counts


def model_layers(job: Job) -> Counts:
    """All layers of the model by kind, including the layers of multi-token prediction."""
    return _counted(job.model, 0, job.model.layers) + _of_heads(job.model)


@lru_cache(maxsize=4096)
def stage_layers(job: Job, layers: tuple[int, ...]) -> tuple[StageLayers, ...]:
    """The layers of every virtual stage by kind, given the number of layers of each stage.

    The last stage, or one before it, also holds the layers of multi-token prediction.
    """
    found, total = [], sum(layers)
    for start, end in pairwise(accumulate(layers, initial=0)):
        count = _counted(job.model, start, end)
        if job.fp8 is None:
            found.append(StageLayers(count, count))
            continue
        at_start, at_end = min(end, job.bf16_at_start), max(start, total - job.bf16_at_end)
        wide = (
            count
            if at_start >= at_end
            else {
                kind: _counted(job.model, start, at_start).get(kind, 0) + _counted(job.model, at_end, end).get(kind, 0)
                for kind in count
            }
        )
        found.append(StageLayers(count, wide))
    if job.model.mtp_heads:
        place = max(0, len(found) - 1 - job.model.behind_mtp)
        counts = Counter(found[place].counts) + _of_heads(job.model)
        found[place] = StageLayers(counts, counts if job.fp8 is None else Counter(found[place].wide))
    return tuple(found)


def _counted(model: ModelShape, start: int, end: int) -> Counter[str]:
    if not model.pattern:
        return Counter({"t": max(0, end - start)})
    return Counter(map(type_of, model.pattern[start : max(start, end)]))


def _of_heads(model: ModelShape) -> Counter[str]:
    return Counter(head_kinds(model))


def head_kinds(model: ModelShape) -> list[str]:
    """The kinds of all layers of multi-token prediction; each head's begin with its projection (m)."""
    return list(map(type_of, "".join(f"m{letters}" for letters in model.mtp_heads)))
