"""A layer stack that lets hybrid models run without Transformer Engine. The stack supports attention layers (`*`), MLP
layers (`-`), and multi-token prediction layers built from these two kinds.

    --hybrid-layer-pattern "*-*-|*-*-" --spec megatron_vp.mcore.hybrid_stack local_stack_spec

Megatron's own stacks consist of Transformer Engine's layers, and their Mamba and gated delta net layers also need CUDA
kernels. Import this module only through `--spec`: on import, it reads Megatron's layers, which must already be patched.
"""

from __future__ import annotations

import dataclasses

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_whole = get_gpt_layer_local_submodules()
_nothing = TransformerLayerSubmodules()
# In checkpoints, `sharded_state_dict_keys_map` gives norms the names that they have in Transformer Engine's fused
# layers.
_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda", "sharded_state_dict_keys_map")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda", "sharded_state_dict_keys_map")


def _only(parts: tuple[str, ...]) -> TransformerLayerSubmodules:
    return dataclasses.replace(_nothing, **{name: getattr(_whole, name) for name in parts})


local_stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=_only(_ATTENTION)),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_only(_MLP)),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[get_mtp_layer_spec(None, False)]),
        ),
    ),
)
