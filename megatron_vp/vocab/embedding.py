"""Input embedding of one shard: passes IF and IB, and the exchange of owned rows between them and stage 0.

Every rank holds the tokens of a microbatch, so every rank knows who owns which position and how many rows travel:
each sends stage 0 only the rows it owns, and gets back only their gradients. A dense [n, h] reduction would grow with
the number of ranks instead.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.errors import UserError
from megatron_vp.vocab.operations import operations_for
from megatron_vp.vocab.shards import VocabShards
from megatron_vp.vocab.weights import main_grad


class RowExchange:
    """The owner of each position of a microbatch's flattened tokens [n].

    With tensor parallelism an exchange concerns one of the t pipelines side by side: the positions that shards of its
    ranks own, those with index = pipeline rank x t + tensor rank.

    The object is made first and filled later, by `plan`, which may run on another stream: its buffers belong to the
    stream that made it, and nothing in `plan` waits for the device.

    Args:
        tokens_n: int64 token ids; may still be on their way until `plan` runs.
        shards: the cut of the vocabulary, in p x t.
        tensor_size, tensor_rank: t, and which of the t pipelines.
        counts: where `plan` writes how many positions each rank owns: a row of `count_buffer`; None makes one.
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
        """Positions sorted by owner, within an owner by token id and then by position, those of other pipelines last.
        The first k are the layout of the [k, h] buffer that stage 0 receives and of the gradients that it sends, so the
        rows of an owner ascend."""
        self._counted = tokens_n.new_empty(self._ranks + 2)
        self._counts = count_buffer(1, self._ranks, tokens_n.device)[0] if counts is None else counts

    def plan(self) -> None:
        """Find the owners; asynchronous on a GPU. The one sort of a microbatch, whose size never changes."""
        tokens_n, vocab_size = self.tokens_n, self.shards.vocab_size
        operations_for(tokens_n).sort_by_owner_(self.order_n, self._counted, tokens_n, self._spans, vocab_size)
        self._counts.copy_(self._counted, non_blocking=True)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Positions that every pipeline rank owns; valid once `plan` is known to be finished.

        Raises:
            UserError: a token id outside the vocabulary, which no shard owns.
        """
        if isinstance(self._counts, FakeTensor):  # tokens are unknown: assume equal shares of tokens and rows
            shards = self.shards
            ends = [len(self.tokens_n) * shards.start(index) // shards.vocab_size for index in range(shards.count + 1)]
            owned = [end - start for start, end in pairwise(ends)]
            return tuple(owned[self._tensor_rank :: self._tensor_size])
        *counts, _, outside = self._counts.tolist()
        if outside:
            token = self.tokens_n[self.order_n[-1]].item()
            raise UserError(
                f"token id {token} is outside the vocabulary of {self.shards.vocab_size}: the data was made with "
                f"another tokenizer, or the padded vocabulary size is too small"
            )
        return tuple(counts)

    def owned_by(self, index: int) -> torch.Tensor:
        """Token ids that shard `index` of this pipeline owns, in the order in which its rows travel."""
        rank = index // self._tensor_size
        first = sum(self.counts[:rank])
        return self.tokens_n[self.order_n[first : first + self.counts[rank]]]

    def assemble(self, rows_kh: torch.Tensor, words_nh: torch.Tensor) -> None:
        """Put rows sorted by owner [k, h] into token order, [n, h]; zero where another pipeline's shard owns a word."""
        if len(rows_kh) < len(words_nh):
            words_nh.zero_()
        words_nh.index_copy_(0, self.order_n[: len(rows_kh)], rows_kh)

    def sort_by_owner(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The inverse of `assemble`: the owned rows [k, h] of [n, h]."""
        return rows_nh.index_select(0, self.order_n[: sum(self.counts)])


def count_buffer(microbatches: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Room for the counts of several exchanges, int64 [microbatches, ranks + 2] on the host.

    Pinned where `device` is a GPU, so that `RowExchange.plan` does not wait for its copy. Made once per iteration: an
    allocation of pinned memory may wait for the device.
    """
    return torch.empty(microbatches, ranks + 2, dtype=torch.int64, pin_memory=device.type == "cuda")


@lru_cache
def _owner_spans(shards: VocabShards, tensor_size: int, tensor_rank: int, device: torch.device) -> torch.Tensor:
    """Range of keys in `Operations.sort_by_owner_` of each owner, int64 [2, p + 2]: the smallest key, and the smallest
    key beyond it.

    The keys of a pipeline rank's words are their ids. Keys of other pipelines' tokens start at V, those of invalid
    tokens at 2 V.
    """
    size = shards.vocab_size
    own = range(tensor_rank, shards.count, tensor_size)
    first = [*map(shards.start, own), size, 2 * size]
    beyond = [*(shards.start(index + 1) for index in own), 2 * size, 3 * size]
    return torch.tensor([first, beyond], device=device)


class EmbeddingLayer(nn.Module):
    """One shard of the word embedding: rows [V/p, h] of the weight, and the passes IF and IB over it."""

    def __init__(self, weight: nn.Parameter, shards: VocabShards, index: int) -> None:
        super().__init__()
        self.weight = weight
        self.shards = shards
        self.index = index

    @torch.no_grad()
    def forward(self, exchange: RowExchange) -> torch.Tensor:
        """Pass IF: the rows that this shard owns of a microbatch, [k, h] in the model's dtype."""
        return self.weight.index_select(0, self._rows(exchange))

    @torch.no_grad()
    def backward_pass(self, exchange: RowExchange, gradient_kh: torch.Tensor) -> None:
        """Pass IB: add the gradients of the owned rows [k, h] to `weight.main_grad`, deterministically."""
        rows_k = self._rows(exchange)
        operations_for(gradient_kh).add_rows_(main_grad(self.weight), rows_k, gradient_kh, sorted_rows=True)

    def _rows(self, exchange: RowExchange) -> torch.Tensor:
        return exchange.owned_by(self.index) - self.shards.start(self.index)
