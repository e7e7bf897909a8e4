"""Supports heterogeneous layers (`--heterogeneous-layers-config-path`) on ranks with several chunks.

Megatron's builder knows which chunk it builds, but does not pass the chunk's index to the function that lists the
layers of a heterogeneous model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

from megatron_vp.mcore.patches import Patch


def _of_the_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def default_layer_spec(config: Any, vp_stage: int | None) -> Any:
        """Return the layers of chunk `vp_stage` of a heterogeneous model; call the original for any other model."""
        layers = config.transformer
        if not isinstance(layers, HeterogeneousTransformerConfig):
            return original(config, vp_stage)
        uses_engine = layers.transformer_impl == "transformer_engine"
        return get_gpt_heterogeneous_layer_spec(layers, uses_engine, vp_stage=vp_stage)

    return default_layer_spec


PATCHES = (
    Patch(
        "megatron.training.models.gpt:default_layer_spec",
        _of_the_chunk,
        "the layers of a heterogeneous model would not be found if ranks have several chunks",
    ),
)
