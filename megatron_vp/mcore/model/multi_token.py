"""Multi-token prediction: k further heads, each a layer on the last stage, that predict the tokens after the next.

Megatron's block of these layers follows the decoder and hands on the states of all 1 + k heads, one after the other;
the passes S and T treat them as 1 + k times as many tokens. The block looks up the tokens ahead, so the last stage is
sent the words of the microbatch as the first is. Evaluation has one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from torch import nn

_SHARED = ("attention_mask", "padding_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
_SHARED += ("packed_seq_params", "sequence_len_offset")
"""What the decoder and the block are called with alike."""


class ReceivedWords(nn.Module):
    """In the place of `word_embeddings`: hands the block words that were received.

    ahead: for each further head in turn its words [b, s, h], one position further than the head's before; None in
        evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ahead: Iterator[torch.Tensor] | None = None

    def forward(self, _no_ids: None) -> torch.Tensor:
        """The words of the next head, [b, s, h]."""
        return next(self.ahead)


def follow_decoder(chunk: nn.Module) -> None:
    """Let the block run at the end of the chunk's decoder, on received words; the chunk keeps no embedding.

    Megatron would count the chunk among the owners of the word embedding, in checkpoints and in the gradients'
    reduction, so the chunk says that it has no such block.
    """
    words = ReceivedWords()
    chunk.received_embedding, chunk.embedding = chunk.embedding, None
    chunk.received_embedding.word_embeddings = words
    # The words arrive whole on every tensor rank; Megatron cuts the sequence after it has looked them up.
    chunk.received_embedding.reduce_scatter_embeddings = False
    chunk.mtp_process = False

    def run_heads(_decoder: nn.Module, _args: tuple, given: dict[str, Any], hidden_sbh: torch.Tensor) -> torch.Tensor:
        if words.ahead is None:
            return hidden_sbh
        heads_sbh = chunk.mtp(
            input_ids=None,  # the words of each head are known, and nothing is left to shift
            position_ids=None,
            hidden_states=hidden_sbh,
            embedding=chunk.received_embedding,
            **{name: given[name] for name in _SHARED if name in given},
        )
        words.ahead = None
        return heads_sbh

    chunk.decoder.register_forward_hook(run_heads, with_kwargs=True)


def with_following(
    values_bs: torch.Tensor, count: int, stretches: int, context_group: dist.ProcessGroup
) -> torch.Tensor:
    """Values of positions, [b, s], and behind them those of the `count` positions that follow each stretch.

    With context parallelism other ranks hold them: Megatron's own shift by one position brings what it moves in.

    Args:
        values_bs: int64, of this rank's positions.
        count: how many follow.
        stretches: pieces of a longer sequence that this rank's positions are.
        context_group: all of its ranks call this together.

    Returns:
        [b, s + stretches * count]; 0 beyond a sequence's end.
    """
    shifted_bs, following = values_bs, []
    for _ in range(count):
        shifted_bs, _ = multi_token_prediction.roll_tensor(shifted_bs, cp_group=context_group)
        following.append(shifted_bs.unflatten(1, (stretches, -1))[:, :, -1])
    if not following:
        return values_bs
    return torch.cat([values_bs, torch.stack(following, dim=2).flatten(1)], dim=1)


class _Head:
    """Stands for the output layer in Megatron's loss of the heads: their token losses are already there."""

    def __init__(self, target_is_argmax_kbs: list[torch.Tensor]) -> None:
        self._target_is_argmax_kbs = iter(target_is_argmax_kbs)
        self.target_is_argmax_bs: torch.Tensor | None = None

    def __call__(self, token_loss_bs: torch.Tensor, **_options: Any) -> tuple[torch.Tensor, None]:
        self.target_is_argmax_bs = next(self._target_is_argmax_kbs)
        return token_loss_bs, None


def with_further_heads(
    token_loss_ks: torch.Tensor,
    target_is_argmax_ks: torch.Tensor,
    labels_bs: Any,
    loss_mask_bs: Any,
    config: Any,
    context_group: dist.ProcessGroup,
) -> torch.Tensor:
    """The next token's losses [b, s], whose backward starts that of the other heads' losses too; logs the latter.

    Args:
        token_loss_ks: of all heads, [(1 + k) b, s].
        target_is_argmax_ks: whether the target is the likeliest token, same shape.
        labels_bs, loss_mask_bs: as the user's script gave them to the model.
        config: Megatron's.
        context_group: all of its ranks call this together, for the part of the mask that each has for the one before.
    """
    _, *further = target_is_argmax_ks.chunk(1 + config.mtp_num_layers)
    return process_mtp_loss(
        hidden_states=token_loss_ks,
        labels=labels_bs,
        loss_mask=loss_mask_bs,
        output_layer=_Head(further),
        output_weight=None,
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=lambda _labels, token_loss_bs: token_loss_bs,
        config=config,
        cp_group=context_group,
    )


def counting_argmax(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's count of accepted predictions, which takes whole logits."""

    def acceptance_counts(
        mtp_logits: torch.Tensor,
        mtp_labels: torch.Tensor,
        loss_mask: torch.Tensor,
        output_layer: Callable[..., Any],
        runtime_gather_output: bool | None,
        tp_group: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counted_bs = loss_mask.bool()
        return (output_layer.target_is_argmax_bs & counted_bs).sum().float(), counted_bs.sum().float()

    return acceptance_counts
