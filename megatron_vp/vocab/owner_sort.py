"""Sorts the positions of a microbatch by the owner of each token's embedding row, for the collective TOKENS.

This version uses PyTorch's sort and runs on any device.
"""

from __future__ import annotations

import torch


def sort_by_owner_(
    order_n: torch.Tensor, counts: torch.Tensor, tokens_n: torch.Tensor, spans: torch.Tensor, vocab_size: int
) -> None:
    """See `Operations.sort_by_owner_`. Does not wait for the device."""
    first, beyond = spans[:, :-2]
    word_n = tokens_n.clamp(0, vocab_size - 1)
    shard_n = (torch.bucketize(word_n, first, right=True) - 1).clamp_(0)
    owned_n = (word_n >= first[shard_n]) & (word_n < beyond[shard_n])
    # The key is the nearest valid id plus 0 (this pipeline owns the id), V (another pipeline owns it) or 2 V (the id is
    # invalid).
    key_n = word_n + vocab_size * torch.where(word_n == tokens_n, 1 - owned_n.long(), 2)
    sorted_n, sorted_order_n = key_n.sort(stable=True)
    order_n.copy_(sorted_order_n)
    counts.copy_(torch.searchsorted(sorted_n, spans).diff(dim=0)[0])
