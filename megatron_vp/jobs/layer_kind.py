"""Determines which implementation of transformer layers a job uses; their activation memory depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from megatron_vp.errors import UserError


class LayerKind(StrEnum):
    """The implementation of a transformer layer."""

    PAPER = "paper"
    """The layers of the paper's authors, whose published memory the cost model's constants were fitted to."""
    ENGINE = "transformer_engine"
    """Transformer Engine's fused layers."""
    LOCAL = "local"
    """Megatron's own layers, whose attention stores the scores of all heads in memory."""
    LOCAL_SDPA = "local_sdpa"
    """Megatron's own layers with PyTorch's fused attention (`--core-attention sdpa`)."""

    @property
    def line(self) -> str:
        """One line for the user that names the layers whose memory was predicted."""
        return _LINES[self]


_LINES = {
    LayerKind.PAPER: "layers: the paper authors' implementation",
    LayerKind.ENGINE: "layers: Transformer Engine's fused ones (--transformer-impl local for Megatron's own)",
    LayerKind.LOCAL: "layers: Megatron's local ones, whose attention keeps all scores (--core-attention sdpa keeps "
    "none; --transformer-impl transformer_engine for fused layers)",
    LayerKind.LOCAL_SDPA: "layers: Megatron's local ones with PyTorch's fused attention (--transformer-impl "
    "transformer_engine for fused layers)",
}


def layer_kind(arguments: Mapping[str, Any]) -> LayerKind:
    """The kind of layers that a job's `arguments` (by long name, with underscores) select.

    Without `transformer_impl`, layers are local if `core_attention` is sdpa, which only local layers support, and
    otherwise Transformer Engine's, as in Megatron. Raises UserError for an implementation that does not exist.
    """
    attention, implementation = arguments.get("core_attention"), arguments.get("transformer_impl")
    if implementation is None:
        implementation = "local" if attention == "sdpa" else "transformer_engine"
    if implementation not in ("local", "transformer_engine", "inference_optimized"):
        raise UserError(f"--transformer-impl {implementation!r} is unknown: use transformer_engine or local")
    if implementation != "local":
        return LayerKind.ENGINE
    return LayerKind.LOCAL_SDPA if attention == "sdpa" else LayerKind.LOCAL
