"""Input embedding of one shard: passes IF and IB, and the exchange of embedding rows and their gradients with stage 0.

A rank owns a position of a microbatch if it holds the embedding row of the token there. Every rank has all tokens, so
it knows the owner of each position and how many rows each rank sends. A rank sends stage 0 only the rows that it owns,
and receives only the gradients of these rows. The traffic of a dense [n, h] reduction, by contrast, would grow with the
number of ranks.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.errors import UserError
from megatron_vp.vocab.operations import main_grad, operations_for
from megatron_vp.vocab.shards import VocabShards


class RowExchange:
    """Finds the owner of each position of a microbatch's flattened tokens [n]. The owner is the rank that holds the
    embedding row of the position's token.

    With tensor parallelism of size t, a model replica has t pipelines, and an exchange covers the positions that the
    ranks of one pipeline own. The index of a shard is pipeline rank x t + tensor rank.

    `plan` fills the object, and may run on another stream. The buffers belong to the stream on which the object was
    created.

    Args:
        tokens_n: int64 token ids; their values are first read in `plan`.
        tensor_size, tensor_rank: t, and the index of this pipeline among the t pipelines of a replica.
        counts: a row of `count_buffer` for the number of positions that each rank owns; None allocates a new row.
    """

    def __init__(
        self,
        tokens_n: torch.Tensor,
        shards: VocabShards,
        tensor_size: int = 1,
        tensor_rank: int = 0,
        counts: torch.Tensor | None = None,
    ) -> None:
        self.tokens_n = tokens_n
        self.shards = shards
        self._tensor_size = tensor_size
        self._tensor_rank = tensor_rank
        self._ranks = shards.count // tensor_size
        self._spans = _owner_spans(shards, tensor_size, tensor_rank, tokens_n.device)
        self.order_n = torch.empty_like(tokens_n)
        """Positions sorted by owner, then by token id, then by position; positions that other pipelines own come last.
        The first k positions, which this pipeline owns, define the layout of the [k, h] buffers that stage 0 receives
        and sends.
        """
        self._counted = tokens_n.new_empty(self._ranks + 2)
        self._counts = count_buffer(1, self._ranks, tokens_n.device)[0] if counts is None else counts

    def plan(self) -> None:
        """Sort the positions by owner and count each owner's positions, asynchronously on a GPU."""
        tokens_n, vocab_size = self.tokens_n, self.shards.vocab_size
        operations_for(tokens_n).sort_by_owner_(self.order_n, self._counted, tokens_n, self._spans, vocab_size)
        self._counts.copy_(self._counted, non_blocking=True)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of positions that each pipeline rank owns; valid once `plan` is known to be finished.

        Raises:
            UserError: a token id is outside the vocabulary, so that no shard owns it.
        """
        if isinstance(self._counts, FakeTensor):
            # Fake token ids have no values, so an even spread over all rows is assumed.
            shards = self.shards
            ends = [len(self.tokens_n) * shards.start(index) // shards.vocab_size for index in range(shards.count + 1)]
            owned = [end - start for start, end in pairwise(ends)]
            return tuple(owned[self._tensor_rank :: self._tensor_size])
        *counts, _, outside = self._counts.tolist()
        if outside:
            token = self.tokens_n[self.order_n[-1]].item()
            raise UserError(
                f"token id {token} is outside the vocabulary of {self.shards.vocab_size} tokens: use the tokenizer "
                "that the data was made with, or a larger padded vocabulary"
            )
        return tuple(counts)

    def owned_by(self, index: int) -> torch.Tensor:
        """The microbatch's token ids that shard `index` of this pipeline owns, in the order in which it sends rows."""
        rank = index // self._tensor_size
        first = sum(self.counts[:rank])
        return self.tokens_n[self.order_n[first : first + self.counts[rank]]]

    def assemble(self, rows_kh: torch.Tensor, words_nh: torch.Tensor) -> None:
        """Copy rows sorted by owner, [k, h], into token order, [n, h]; zero the rows that other pipelines own."""
        if len(rows_kh) < len(words_nh):
            words_nh.zero_()
        words_nh.index_copy_(0, self.order_n[: len(rows_kh)], rows_kh)

    def sort_by_owner(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The inverse of `assemble`: from the rows of all tokens, [n, h], select those that this pipeline owns, [k, h],
        and sort them by owner.
        """
        return rows_nh.index_select(0, self.order_n[: sum(self.counts)])


def count_buffer(microbatches: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Allocate a buffer for the counts of several exchanges, int64 [microbatches, ranks + 2] on the host.

    The buffer is pinned if `device` is a GPU, so that `RowExchange.plan` does not wait for the copy to the host. One
    buffer is allocated per iteration, because allocating pinned memory may wait for the device.
    """
    return torch.empty(microbatches, ranks + 2, dtype=torch.int64, pin_memory=device.type == "cuda")


@lru_cache
def _owner_spans(shards: VocabShards, tensor_size: int, tensor_rank: int, device: torch.device) -> torch.Tensor:
    """Return the start and the exclusive end of each owner's range of sort keys; see `sort_by_owner_`."""
    size = shards.vocab_size
    own = range(tensor_rank, shards.count, tensor_size)
    first = [*map(shards.start, own), size, 2 * size]
    beyond = [*(shards.start(index + 1) for index in own), 2 * size, 3 * size]
    return torch.tensor([first, beyond], device=device)


class EmbeddingLayer(nn.Module):
    """One shard of the word embedding: rows [V/p, h] of the weight, and the passes IF and IB over these rows."""

    def __init__(self, weight: nn.Parameter, shards: VocabShards, index: int) -> None:
        super().__init__()
        self.weight = weight
        self.shards = shards
        self.index = index

    @torch.no_grad()
    def forward(self, exchange: RowExchange) -> torch.Tensor:
        """Pass IF: look up this shard's rows for a microbatch's tokens, [k, h] in the model's dtype."""
        return self.weight.index_select(0, self._rows(exchange))

    @torch.no_grad()
    def backward_pass(self, exchange: RowExchange, gradient_kh: torch.Tensor) -> None:
        """Pass IB: add the gradients of the owned rows [k, h] to `weight.main_grad`, deterministically."""
        rows_k = self._rows(exchange)
        operations_for(gradient_kh).add_rows_(main_grad(self.weight), rows_k, gradient_kh, sorted_rows=True)

    def _rows(self, exchange: RowExchange) -> torch.Tensor:
        return exchange.owned_by(self.index) - self.shards.start(self.index)
