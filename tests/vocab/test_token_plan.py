"""Test the kernel that plans a microbatch's tokens against PyTorch's sort: the same bits."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from megatron_vp.vocab import embedding
from megatron_vp.vocab.embedding import RowExchange
from megatron_vp.vocab.kernels import tokens as kernel
from megatron_vp.vocab.kernels.fused import FusedOperations
from megatron_vp.vocab.operations import EagerOperations
from megatron_vp.vocab.shards import VocabShards

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plans(tokens, shards, tensor_size=1, tensor_rank=0):
    """Order and counts, from the kernel and from PyTorch, which both get buffers full of other numbers."""
    spans = embedding._owner_spans(shards, tensor_size, tensor_rank, tokens.device)
    found = []
    for operations in (FusedOperations(), EagerOperations()):
        order = torch.full_like(tokens, -7)
        counts = torch.full((shards.count // tensor_size + 2,), -7, device=tokens.device)
        operations.sort_by_owner_(order, counts, tokens, spans, shards.vocab_size)
        found.append((order.tolist(), counts.tolist()))
    return found


def written_out(tokens, shards, tensor_size, tensor_rank):
    """The same by the definition, token by token."""
    ranks = shards.count // tensor_size

    def owner(token):
        for index in range(shards.count):
            if shards.start(index) <= token < shards.start(index + 1):
                return index // tensor_size if index % tensor_size == tensor_rank else ranks
        return ranks + 1

    words = [min(max(token, 0), shards.vocab_size - 1) for token in tokens]
    owners = [owner(token) for token in tokens]
    order = sorted(range(len(tokens)), key=lambda position: (owners[position], words[position], position))
    return order, [owners.count(each) for each in range(ranks + 2)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Many programs and chunks of few positions."""
    monkeypatch.setattr(kernel, "QUERIES", 16)
    monkeypatch.setattr(kernel, "CHUNK", 32)


# Below one block of positions, one chunk and more, on and off their edges.
@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 33, 70])
@pytest.mark.parametrize("words", ["all alike", "few", "many"])
def test_the_same_bits_as_pytorchs_sort(small_blocks, count, words):
    shards = VocabShards(3000, 6)
    size = {"all alike": 1, "few": 5, "many": 3000}[words]
    tokens = torch.randint(size, (count,), generator=torch.Generator().manual_seed(count)).to(DEVICE) * (3000 // size)
    ours, theirs = plans(tokens, shards)
    assert ours == theirs == written_out(tokens.tolist(), shards, 1, 0)


def test_the_same_bits_in_blocks_as_they_are():
    shards = VocabShards(5000, kernel.QUERIES + 3)  # more owners than a program counts
    tokens = torch.randint(5000, (2 * kernel.QUERIES + 5,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ours, theirs = plans(tokens, shards)
    assert ours == theirs == written_out(tokens.tolist(), shards, 1, 0)


@pytest.mark.parametrize("seed", range(12))
def test_random_shards_tensor_ranks_and_ids_of_nobody(small_blocks, seed):
    draw = random.Random(seed)
    tensor, stages = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3, 5, 8, 20))
    if draw.random() < 0.5:
        rows = (*(tensor * draw.choice((0, 0, 1, 3, 8, 17)) for _ in range(stages - 1)), tensor)
        shards = VocabShards(sum(rows), stages * tensor, tensor, rows)
    else:
        shards = VocabShards(tensor * draw.randint(1, 300), stages * tensor, tensor)
    outside = draw.choice((0, 0, 3))
    ids = [draw.randint(-outside, shards.vocab_size - 1 + outside) for _ in range(draw.randint(1, 40))]
    ids += [draw.choice((-(2**40), 2**31, 2**40))] * (outside and draw.randint(0, 2))
    for place in range(tensor):
        ours, theirs = plans(torch.tensor(ids, device=DEVICE), shards, tensor, place)
        assert ours == theirs == written_out(ids, shards, tensor, place)


def test_more_tokens_or_words_than_the_kernel_takes_are_left_to_pytorch(monkeypatch):
    launched = []
    monkeypatch.setattr(kernel, "sort_by_owner_", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(kernel, "MOST_TOKENS", 4)
    order, counts = torch.empty(5, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    tokens = torch.tensor([3, 1, 2, 0, 1])
    for size in (4, 2**31 // 3 + 1):
        taken = tokens[: 5 if size == 4 else 4]
        spans = torch.tensor([[0, size, 2 * size], [size, 2 * size, 3 * size]])
        FusedOperations.sort_by_owner_(order[: len(taken)], counts, taken, spans, size)
        assert counts.tolist() == [len(taken), 0, 0]
        assert order[: len(taken)].tolist() == ([3, 1, 4, 2, 0] if size == 4 else [3, 1, 2, 0])
    assert not launched


def test_an_exchange_is_planned_by_the_kernel(monkeypatch):
    launch, launched = kernel.sort_by_owner_, []
    monkeypatch.setattr(kernel, "sort_by_owner_", lambda *arguments: launched.append(launch(*arguments)))
    monkeypatch.setattr(embedding, "operations_for", lambda tensor: FusedOperations())
    shards, tokens = VocabShards(50, 3), torch.tensor([49, 0, 20, 3, 0, 17], device=DEVICE)
    exchange = RowExchange(tokens, shards)
    exchange.plan()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert exchange.counts == (5, 0, 1) and shards.rows(0) == 24
    assert exchange.order_n.tolist() == [1, 4, 3, 5, 2, 0]
    assert len(launched) == 1
