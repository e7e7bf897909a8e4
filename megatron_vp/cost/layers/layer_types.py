"""Counts the layers of every stage by their kind (see `layer_operations.LAYERS`)."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron_vp.cost.layers.layer_operations import LAYERS, WIDE
from megatron_vp.cost.layers.shapes import Job, ModelShape

Counts = Counter[str]
"""The number of layers of each kind."""


def type_of(letter: str) -> str:
    """The kind of layer that the cost model uses for a letter of a pattern.

    Unknown letters, such as Mamba (M) and other forms of latent attention (D, +), are counted as plain attention.
    """
    return letter if letter in LAYERS else "*"


def layer_kinds(job: Job, layers: int) -> list[str]:
    """The kinds of the `layers` layers of the model, without those of multi-token prediction. With an fp8 recipe, those
    at the model's ends that stay in 16 bits are WIDE.
    """
    first, last = (job.bf16_at_start, layers - job.bf16_at_end) if job.fp8 else (0, layers)
    kinds = map(type_of, job.model.pattern or "t" * layers)
    return [kind if first <= place < last else kind + WIDE for place, kind in enumerate(kinds)]


@lru_cache(maxsize=4096)
def stage_kinds(job: Job, layers: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """The kinds of the layers of every virtual stage in order, given the number of layers of each stage.

    The last stage, or one before it, also holds the layers of multi-token prediction.
    """
    kinds = layer_kinds(job, sum(layers))
    found = [kinds[start:end] for start, end in pairwise(accumulate(layers, initial=0))]
    found[max(0, len(found) - 1 - job.model.behind_mtp)] += head_kinds(job.model)
    return tuple(map(tuple, found))


@lru_cache(maxsize=4096)
def stage_layers(job: Job, layers: tuple[int, ...]) -> tuple[Counts, ...]:
    """The layers of every virtual stage by kind."""
    return tuple(map(Counter, stage_kinds(job, layers)))


def head_kinds(model: ModelShape) -> list[str]:
    """The kinds of all layers of multi-token prediction; each head's begin with its projection (m)."""
    return list(map(type_of, "".join(f"m{letters}" for letters in model.mtp_heads)))
