"""Determines which implementation of transformer layers a job uses, because activation memory depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class LayerKind(StrEnum):
    """The implementation of a transformer layer."""

    PAPER = "paper"
    """The paper authors' layers, whose memory is predicted with constants fitted to the published figures."""
    ENGINE = "transformer_engine"
    """Transformer Engine's fused layers."""
    LOCAL = "local"
    """Megatron's own layers, whose attention stores the scores of all heads in memory."""
    LOCAL_SDPA = "local_sdpa"
    """Megatron's own layers with PyTorch's fused attention (`--core-attention sdpa`)."""

    @property
    def line(self) -> str:
        """The line of a command's output that names the implementation."""
        return _LINES[self]


_LINES = {
    LayerKind.PAPER: "layers: the paper authors' implementation",
    LayerKind.ENGINE: "layers: Transformer Engine's fused layers (for Megatron's own, use --transformer-impl local)",
    LayerKind.LOCAL: "layers: Megatron's local layers, whose attention keeps all scores (to keep none, use "
    "--core-attention sdpa; for fused layers, use --transformer-impl transformer_engine)",
    LayerKind.LOCAL_SDPA: "layers: Megatron's local layers with PyTorch's fused attention (for fused layers, use "
    "--transformer-impl transformer_engine)",
}


def layer_kind(arguments: Mapping[str, Any]) -> LayerKind:
    """The kind of layers that a job's `arguments` (by long name, with underscores) select.

    Without `transformer_impl`, the layers are Transformer Engine's, as in Megatron. If `core_attention` is sdpa, the
    default is Megatron's local layers, because only these support it.
    """
    attention, implementation = arguments.get("core_attention"), arguments.get("transformer_impl")
    if implementation is None:
        implementation = "local" if attention == "sdpa" else "transformer_engine"
    if implementation != "local":
        return LayerKind.ENGINE
    return LayerKind.LOCAL_SDPA if attention == "sdpa" else LayerKind.LOCAL
