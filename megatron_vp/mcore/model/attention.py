"""Flash attention for Megatron's local layers, based on PyTorch's scaled-dot-product attention.

Megatron's own local attention writes the scores of all heads, [b, heads, s, s], to memory, keeps the softmax for the
backward, and does not support context parallelism. PyTorch's fused kernels keep neither scores nor softmax. With
context parallelism, every rank gathers the keys and values of all ranks. `--core-attention sdpa` selects this attention
for local layers; Transformer Engine's layers keep their own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import causal_lower_right

from megatron_vp.errors import UserError
from megatron_vp.mcore.settled import process


class ScaledDotProductAttention(MegatronModule):
    """Replaces Megatron's `DotProductAttention`, with the same tensor shapes.

    The constructor ignores `k_channels` and `v_channels`, because the tensors already have these sizes.

    All attention is causal. A mask argument is ignored, because it only encodes causality. Megatron's query-key layer
    scaling, which keeps fp16 scores in range, is not needed, because fused kernels compute scores in fp32.

    With context parallelism, every sequence (or every document of a packed sequence) is cut into 2c pieces, and rank r
    of c holds pieces r and 2c - 1 - r. Megatron's `get_batch_on_this_cp_rank` cuts sequences in this way to balance
    causal attention. The attention of a piece uses the keys up to the end of the piece, with a causal mask.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        # A replay that counts the memory that Transformer Engine would use does not gather keys and values. Transformer
        # Engine passes them around a ring, and each rank keeps only those of its own part of the sequence.
        in_parts = config.context_parallel_size > 1 and not process.counts_engine
        self.context_group = pg_collection.cp if in_parts else None
        if attn_mask_type is not AttnMaskType.causal:
            raise UserError(
                f"--core-attention sdpa supports only causal attention, but layer {layer_number} has the mask type "
                f"{attn_mask_type.name}: leave the option out"
            )
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
        """Compute attention. The documents of a packed sequence do not attend to each other.

        Args:
            query, key, value: tensors of one dtype with the shapes [s, b, heads, d], [s, b, groups, d] and [s, b,
                groups, dv], where `groups` divides `heads`, and dv is d except in latent attention.
            packed_seq_params: where the documents of a packed sequence begin and end; query, key and value then have no
                dimension b.

        Returns:
            The context, [s, b, heads * dv], or [s, heads * dv] for a packed sequence.
        """
        if packed_seq_params is not None:
            lengths = self._lengths(packed_seq_params)
            documents = zip(*(each.unsqueeze(1).split(lengths) for each in (query, key, value)), strict=True)
            return torch.cat([self(*parts, attention_mask=None).squeeze(1) for parts in documents])
        if _alone_keeps_more(value, query):
            value = value.clone(memory_format=torch.contiguous_format)
        # [s, b, heads, d] -> [b, heads, s, d]
        query_bnsd, key_bgsd, value_bgsd = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # Each tensor-parallel rank draws dropout for its own heads, from the generator that Megatron's attention uses.
        forks = self.training and self.dropout and not self.config.sequence_parallel
        attend = self._attend if self.context_group is None else self._attend_by_pieces
        with tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext():
            context_bnsd = attend(query_bnsd, key_bgsd, value_bgsd)
        return context_bnsd.permute(2, 0, 1, 3).flatten(2)

    def _attend(
        self, query_bnsd: torch.Tensor, key_bgsd: torch.Tensor, value_bgsd: torch.Tensor, mask: Any = None
    ) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query_bnsd,
            key_bgsd,
            value_bgsd,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query_bnsd.shape[1] != key_bgsd.shape[1],
            attn_mask=mask,
            is_causal=mask is None,
        )

    def _lengths(self, packed_seq_params: Any) -> list[int]:
        """Count the tokens of each document on this rank, including the padding after it; omit empty documents.

        Every layer copies the documents' boundaries to the host, as Megatron's rotary embedding does.
        """
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
        ranks = 1 if self.context_group is None else self.context_group.size()
        return [(end - start) // ranks for start, end in pairwise(ends) if end > start]

    def _attend_by_pieces(
        self, query_bnsd: torch.Tensor, key_bgsd: torch.Tensor, value_bgsd: torch.Tensor
    ) -> torch.Tensor:
        rank, ranks = self.context_group.rank(), self.context_group.size()
        key_bgsd, value_bgsd = (_whole_sequence(part, self.context_group) for part in (key_bgsd, value_bgsd))
        contexts = []
        for piece_bnsd, index in zip(query_bnsd.chunk(2, dim=2), (rank, 2 * ranks - 1 - rank), strict=True):
            length = piece_bnsd.shape[2]
            end = length * (index + 1)
            # With `causal_lower_right`, the last query attends to every key. Fused kernels recognise this mask object
            # and need no mask matrix. Fake tensors do not support this object.
            mask = None if isinstance(piece_bnsd, FakeTensor) else causal_lower_right(length, end)
            contexts.append(self._attend(piece_bnsd, key_bgsd[:, :, :end], value_bgsd[:, :, :end], mask))
        return torch.cat(contexts, dim=2)


def _alone_keeps_more(value: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether saving `value` for the backward would keep the whole joint projection of queries, keys and values alive.
    If the rotary embedding has copied queries and keys, only `value` still refers to the projection.
    """
    whole = value.untyped_storage()
    return whole.nbytes() > value.nbytes and whole._cdata != query.untyped_storage()._cdata


def _whole_sequence(part_bgsd: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the pieces of all ranks in sequence order; the backward sums all ranks' gradients of each piece."""
    ranks = group.size()
    by_rank_sbgd = tensor_parallel.gather_from_sequence_parallel_region(
        part_bgsd.permute(2, 0, 1, 3).contiguous(), tensor_parallel_output_grad=True, group=group
    )
    pieces = by_rank_sbgd.chunk(2 * ranks)
    return torch.cat([*pieces[::2], *pieces[:0:-2]]).permute(1, 2, 0, 3)


def _core_attention(original: Callable[..., type]) -> Callable[..., type]:
    return lambda self: ScaledDotProductAttention
