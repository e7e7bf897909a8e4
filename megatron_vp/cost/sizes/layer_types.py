"""Types of layers: a whole transformer layer of a GPT model, or one letter of a hybrid model's pattern.

An attention letter and an MLP letter together make a transformer layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_vp.cost.sizes.shapes import Job, ModelShape, Recompute


class LayerType(StrEnum):
    """The types of layers for which costs are computed."""

    WHOLE = "t"
    """attention, then an MLP or experts: a layer of a GPT model"""
    DENSE = "d"
    """attention, then an MLP: a layer without experts in a GPT model that has experts in other layers"""
    ATTENTION = "*"
    MLP = "-"
    EXPERTS = "E"

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self in (LayerType.WHOLE, LayerType.DENSE, LayerType.ATTENTION)

    @property
    def share(self) -> float:
        """Norms, dropouts and residual additions of this layer type, as a fraction of those of a transformer layer."""
        return 1.0 if self in (LayerType.WHOLE, LayerType.DENSE) else 0.5


class Mlp(NamedTuple):
    """The MLPs of a layer: width, experts (0: no router), experts per token, width of the shared expert (0: none)."""

    width: int
    experts: int
    per_token: int
    shared: int = 0


def mlp_of(model: ModelShape, kind: LayerType) -> Mlp | None:
    """The MLPs of a layer of type `kind`; None if the type has no MLP."""
    if kind is LayerType.ATTENTION:
        return None
    if kind in (LayerType.MLP, LayerType.DENSE):
        return Mlp(model.dense_ffn or model.ffn, 0, 1)
    return Mlp(model.ffn, model.experts, model.mlps_per_token, model.shared_ffn)


class MlpRecompute(StrEnum):
    """The parts of a layer's MLPs that a backward recomputes if it does not recompute the whole layer."""

    NONE = "none"
    ACTIVATION = "activation"
    """the input of the MLP's second matrix product, recomputed from the result of the first product"""
    ALL = "all"
    """everything between the MLP's input and its result"""


def mlp_recompute(job: Job, kind: LayerType) -> MlpRecompute:
    """The parts of a layer's MLPs that `--recompute-modules` makes the backward recompute.

    `mlp` applies to dense MLPs. `moe` and `moe_act` apply to MLPs with experts.
    """
    mlp = mlp_of(job.model, kind)
    if mlp is None or job.recompute is Recompute.FULL:
        return MlpRecompute.NONE
    if ("moe" if mlp.experts else "mlp") in job.recompute_modules:
        return MlpRecompute.ALL
    return MlpRecompute.ACTIVATION if mlp.experts and "moe_act" in job.recompute_modules else MlpRecompute.NONE


def type_of(letter: str) -> LayerType:
    """The layer type that the cost model uses for a letter of a pattern.

    Mamba (M), gated delta net (G) and latent attention (D, +), whose costs are unknown, are counted as plain attention.
    """
    return LayerType(letter) if letter in ("t", "d", "*", "-", "E") else LayerType.ATTENTION


UNKNOWN_LETTERS = "MGD+"
"""Letters of layers that are counted as attention because their costs are unknown."""

Counts = Mapping[LayerType, int]
"""The number of layers of each type."""


class StageLayers(NamedTuple):
    """Layers of one virtual stage by type: all layers, and those whose matrix products run in 16 bits (`wide`)."""

    counts: Counts
    wide: Counts


def model_layers(job: Job) -> Counts:
    """All layers of the model by type, including the layers of multi-token prediction."""
    return _counted(job.model, 0, job.model.layers) + _of_heads(job.model)


@lru_cache(maxsize=4096)
def stage_layers(job: Job, layers: tuple[int, ...]) -> tuple[StageLayers, ...]:
    """The layers of every virtual stage by type, given the number of layers of each stage.

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


def _counted(model: ModelShape, start: int, end: int) -> Counter[LayerType]:
    if not model.pattern:
        return Counter({LayerType.WHOLE: max(0, end - start)})
    return Counter(map(type_of, model.pattern[start : max(start, end)]))


def _of_heads(model: ModelShape) -> Counter[LayerType]:
    return Counter(map(type_of, "".join(model.mtp_heads)))
