"""Input embedding of one shard: passes IF and IB, and the exchange of owned rows between them and stage 0.

Every rank holds the tokens of a microbatch, so every rank knows who owns which position and how many rows travel:
each sends stage 0 only the rows it owns, and gets back only their gradients (design, section 4). A dense [n, h]
reduction would grow with the number of ranks instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.vocab.shards import VocabShards


@dataclass(frozen=True)
class RowExchange:
    """Who owns which position of a microbatch's flattened tokens [n].

    `order_n` lists the positions sorted by owner, in ascending position within an owner: the layout of the [n, h]
    buffer that stage 0 receives and of the gradients it sends. `counts` are the owners' shares of it, on the host.
    """

    tokens_n: torch.Tensor
    order_n: torch.Tensor
    counts: tuple[int, ...]

    @classmethod
    def plan(cls, tokens_n: torch.Tensor, shards: VocabShards) -> RowExchange:
        """Plan the exchange of int64 tokens [n]. Reads the counts back to the host.

        Raises:
            UserError: a token id outside the vocabulary, which no rank owns.
        """
        outside_n = (tokens_n < 0) | (tokens_n >= shards.vocab_size)
        owner_n = torch.where(outside_n, shards.count, shards.owner(tokens_n))
        order_n = torch.argsort(owner_n, stable=True)
        *counts, outside = torch.bincount(owner_n, minlength=shards.count + 1).tolist()
        if outside:
            raise UserError(
                f"token id {tokens_n[outside_n][0].item()} is outside the vocabulary of {shards.vocab_size}: the data "
                f"was made with another tokenizer, or the padded vocabulary size is too small"
            )
        return cls(tokens_n, order_n, tuple(counts))

    def owned_by(self, index: int) -> torch.Tensor:
        """Token ids that shard `index` owns, in the order in which its rows travel, [counts[index]]."""
        first = sum(self.counts[:index])
        return self.tokens_n[self.order_n[first : first + self.counts[index]]]

    def assemble(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """Put rows sorted by owner [n, h] back into token order [n, h]."""
        return torch.empty_like(rows_nh).index_copy_(0, self.order_n, rows_nh)

    def sort_by_owner(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The inverse of `assemble`."""
        return rows_nh.index_select(0, self.order_n)


class EmbeddingLayer(nn.Module):
    """One shard of the word embedding: rows [V/p, h] of the weight, and the passes IF and IB over it."""

    def __init__(self, weight: nn.Parameter, shards: VocabShards, index: int) -> None:
        super().__init__()
        self.weight = weight
        self.shards = shards
        self.index = index

    @torch.no_grad()
    def forward(self, exchange: RowExchange) -> torch.Tensor:
        """Pass IF: the rows that this shard owns of a microbatch, [counts[index], h] in the model's dtype."""
        return self.weight.index_select(0, self._rows(exchange))

    @torch.no_grad()
    def backward_pass(self, exchange: RowExchange, gradient_kh: torch.Tensor) -> None:
        """Pass IB: add the gradients of the owned rows [counts[index], h] to `weight.main_grad`.

        `index_put_` with accumulation sorts equal indices on a GPU, so that the result is deterministic there too.
        """
        main_grad = self.weight.main_grad
        main_grad.index_put_((self._rows(exchange),), gradient_kh.to(main_grad.dtype), accumulate=True)

    def _rows(self, exchange: RowExchange) -> torch.Tensor:
        return exchange.owned_by(self.index) - self.shards.start(self.index)
