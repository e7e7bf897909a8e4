"""Multi-token prediction: the last stage also runs a block of k layers, which predict the k tokens after the next one.

Megatron's block follows the decoder and returns the hidden states of all 1 + k predictions, concatenated. Passes S and
T treat the concatenated states as the states of 1 + k times as many tokens. The block also needs the embeddings of the
following tokens, so the last stage receives the embedding rows of each microbatch, as the first stage does. Evaluation
predicts only the next token.
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
"""The arguments that both the decoder and the MTP block accept."""


class PrefetchedEmbedding(nn.Module):
    """Replaces `word_embeddings` in the MTP block: returns embedding rows that have already been looked up.

    ahead: yields rows [b, s, h] once per layer of the block, each time shifted by one more position than for the layer
        before; None in evaluation.
    beyond: the row for positions past the end of a sequence, [b, 1, h].
    """

    def __init__(self) -> None:
        super().__init__()
        self.ahead: Iterator[torch.Tensor] | None = None
        self.beyond: torch.Tensor | None = None

    def forward(self, _no_ids: None) -> torch.Tensor:
        """Return the rows for the block's next layer, [b, s, h]."""
        return next(self.ahead)


def attach_mtp_block(chunk: nn.Module) -> None:
    """Make the chunk run the MTP block after its decoder, on embedding rows that other ranks have looked up.

    `mtp_process` is set to False, because Megatron would otherwise treat the chunk as an owner of the word embedding in
    checkpoints and in the gradient reduction.
    """
    rows = PrefetchedEmbedding()
    chunk.received_embedding, chunk.embedding = chunk.embedding, None
    chunk.received_embedding.word_embeddings = rows
    # Every tensor rank gets all rows; Megatron splits the sequence after the look-up.
    chunk.received_embedding.reduce_scatter_embeddings = False
    chunk.mtp_process = False

    def run_block(_decoder: nn.Module, _args: tuple, given: dict[str, Any], hidden_sbh: torch.Tensor) -> torch.Tensor:
        if rows.ahead is None:
            return hidden_sbh
        if given.get("packed_seq_params") is not None:
            rows.ahead = _within_documents(rows.ahead, rows.beyond, given["packed_seq_params"].cu_seqlens_q)
        predictions_sbh = chunk.mtp(
            input_ids=None,  # Each layer's rows are already shifted, so no ids are needed.
            position_ids=None,
            hidden_states=hidden_sbh,
            embedding=chunk.received_embedding,
            **{name: given[name] for name in _SHARED if name in given},
        )
        rows.ahead = rows.beyond = None
        return predictions_sbh

    chunk.decoder.register_forward_hook(run_block, with_kwargs=True)


def _within_documents(
    ahead: Iterator[torch.Tensor], beyond_b1h: torch.Tensor, ends: torch.Tensor
) -> Iterator[torch.Tensor]:
    """For each layer of the block, yield the embedding rows [b, s, h] of the tokens that follow in the same document.
    Past the end of the document, the row is `beyond_b1h`.

    Megatron does the same. No loss is computed for the rows past the end, but the block's experts process them.

    Args:
        ahead: yields rows that are shifted by one more position each time.
        ends: 0, then the positions at which documents end, in ascending order.
    """
    for depth, rows_bsh in enumerate(ahead, start=1):
        positions = torch.arange(rows_bsh.shape[1], dtype=ends.dtype, device=ends.device)
        own_ends = ends[torch.searchsorted(ends, positions, right=True).clamp(max=len(ends) - 1)]
        yield torch.where((positions + depth >= own_ends)[:, None], beyond_b1h, rows_bsh)


def append_next_tokens(
    values_bs: torch.Tensor, count: int, cp_chunks: int, context_group: dist.ProcessGroup
) -> torch.Tensor:
    """Extend this rank's values [b, s] by the values at the `count` positions after each of its sequence chunks.

    With context parallelism, these positions can be on other ranks, so Megatron's `roll_tensor` fetches their values.

    Args:
        cp_chunks: how many chunks of the sequence this rank holds.
        context_group: this rank's context-parallel group; all its ranks must call this function together.

    Returns:
        [b, s + cp_chunks * count], with 0 for positions past the end of a sequence.
    """
    shifted_bs, following = values_bs, []
    for _ in range(count):
        shifted_bs, _ = multi_token_prediction.roll_tensor(shifted_bs, cp_group=context_group)
        following.append(shifted_bs.unflatten(1, (cp_chunks, -1))[:, :, -1])
    if not following:
        return values_bs
    return torch.cat([values_bs, torch.stack(following, dim=2).flatten(1)], dim=1)


class _FinishedOutputLayer:
    """Stands in for the output layer in `process_mtp_loss`. Returns its input, which already holds the token losses."""

    def __init__(self, target_is_argmax_kbs: list[torch.Tensor]) -> None:
        self._target_is_argmax_kbs = iter(target_is_argmax_kbs)
        self.target_is_argmax_bs: torch.Tensor | None = None

    def __call__(self, token_loss_bs: torch.Tensor, **_options: Any) -> tuple[torch.Tensor, None]:
        self.target_is_argmax_bs = next(self._target_is_argmax_kbs)
        return token_loss_bs, None


def with_further_predictions(
    token_loss_ks: torch.Tensor,
    target_is_argmax_ks: torch.Tensor,
    labels_bs: Any,
    loss_mask_bs: Any,
    config: Any,
    context_group: dist.ProcessGroup,
    packed_seq_params: Any,
) -> torch.Tensor:
    """Attach the losses of the further predictions to the next token's losses [b, s], so that a single backward covers
    all predictions. Also log the further losses.

    Args:
        token_loss_ks: the token losses of all predictions, [(1 + k) b, s].
        target_is_argmax_ks: whether the target's logit is the largest logit; same shape as `token_loss_ks`.
        context_group: this rank's context-parallel group; all its ranks must call this function together, because
            shifting the mask exchanges values between them.
        packed_seq_params: where the documents of a packed sequence end; None for other sequences.
    """
    _, *further = target_is_argmax_ks.chunk(1 + config.mtp_num_layers)
    return process_mtp_loss(
        hidden_states=token_loss_ks,
        labels=labels_bs,
        loss_mask=loss_mask_bs,
        output_layer=_FinishedOutputLayer(further),
        output_weight=None,
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=lambda _labels, token_loss_bs: token_loss_bs,
        config=config,
        cp_group=context_group,
        packed_seq_params=packed_seq_params,
    )


def counting_argmax(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Megatron's count of accepted predictions by a count that needs `target_is_argmax` but not the logits."""

    def acceptance_counts(
        logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, output_layer: Any, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(output_layer, "target_is_argmax_bs"):  # A plain model's.
            return original(logits, labels, loss_mask, output_layer, *others)
        counted_bs = loss_mask.bool()
        return (output_layer.target_is_argmax_bs & counted_bs).sum().float(), counted_bs.sum().float()

    return acceptance_counts
