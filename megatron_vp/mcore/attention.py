"""Flash attention for Megatron's local layers, over PyTorch's scaled-dot-product attention.

Megatron's own local attention writes the scores of all heads, [b, heads, s, s], to memory and keeps the softmax for the
backward. PyTorch's fused kernels keep neither. Chosen with `--core-attention sdpa`; Transformer Engine's layers bring
their own attention and are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import Patch


class ScaledDotProductAttention(MegatronModule):
    """Core attention in the place of Megatron's `DotProductAttention`: same constructor, same shapes, no parameters.

    A causal layer ignores the mask it is handed: it can only repeat causality, because packed documents are refused
    with the arguments. Scores are scaled once, by 1 / sqrt(head size): Megatron's query-key layer scaling divides them
    by the layer number for the range of fp16 and multiplies it back inside the softmax, which a fused kernel with fp32
    scores has no use for.

    Raises:
        UserError: a softmax or a window that PyTorch's attention does not offer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.softmax_type != "vanilla":
            raise UserError(
                f"--core-attention sdpa has no softmax of type {config.softmax_type}: use --core-attention megatron"
            )
        if config.window_size is not None:
            raise UserError("--core-attention sdpa has no sliding window: use --core-attention megatron")
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, heads, d]; key, value: [s, b, groups, d] with `groups` dividing `heads`; one dtype.
            attention_mask: bool, True where a query must not look, [b or 1, 1, s, s]; unused in a causal layer.
            attn_mask_type: replaces the layer's own.

        Returns:
            The context, [s, b, heads * d].
        """
        assert attention_bias is None and packed_seq_params is None, "refused with the arguments"
        causal = (attn_mask_type or self.attn_mask_type) is AttnMaskType.causal
        # [s, b, heads, d] -> [b, heads, s, d]
        query_bnsd, key_bgsd, value_bgsd = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # Each tensor-parallel rank draws for its own heads, from the generator that Megatron's attention draws from.
        forks = self.training and self.dropout and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext():
            context_bnsd = torch.nn.functional.scaled_dot_product_attention(
                query_bnsd,
                key_bgsd,
                value_bgsd,
                attn_mask=None if causal or attention_mask is None else ~attention_mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query_bnsd.shape[1] != key_bgsd.shape[1],
            )
        return context_bnsd.permute(2, 0, 1, 3).flatten(2)


def _core_attention(original: Callable[..., type]) -> Callable[..., type]:
    def core_attention(self: Any) -> type:
        return ScaledDotProductAttention

    return core_attention


PATCHES = (
    Patch(
        "megatron.core.models.backends:LocalSpecProvider.core_attention",
        _core_attention,
        "flash attention in local layers, through PyTorch's scaled-dot-product attention",
        "(self)",
    ),
)
"""Applied with --core-attention sdpa."""
