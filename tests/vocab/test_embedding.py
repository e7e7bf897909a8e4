"""Test the exchange of owned embedding rows, with all shards in one process."""

import random

import pytest
import torch

from megatron_vp.errors import UserError
from megatron_vp.vocab.embedding import EmbeddingLayer, RowExchange
from megatron_vp.vocab.shards import VocabShards

HIDDEN = 4


def _planned(tokens, shards, *pipeline):
    exchange = RowExchange(tokens, shards, *pipeline)
    exchange.plan()
    return exchange


@pytest.mark.parametrize(("vocab", "ranks", "pipelines"), [(50, 3, 1), (9, 4, 1), (5, 4, 1), (64, 8, 1), (50, 3, 2)])
def test_rows_arrive_in_token_order_and_gradients_return_to_their_owners(vocab, ranks, pipelines):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(vocab, (70,), generator=generator)  # with repetitions
    gradient = torch.randn(70, HIDDEN, generator=generator, dtype=torch.float64)
    expected = torch.nn.functional.embedding(tokens, table)
    expected.backward(gradient)

    shards = VocabShards(vocab, ranks * pipelines)
    layers = []
    for index in range(shards.count):
        weight = torch.nn.Parameter(table[shards.start(index) : shards.start(index + 1)].detach().clone())
        weight.main_grad = torch.zeros_like(weight)
        layers.append(EmbeddingLayer(weight, shards, index))

    total = torch.zeros_like(expected)
    for pipeline in range(pipelines):
        exchange, own = _planned(tokens, shards, pipelines, pipeline), layers[pipeline::pipelines]
        sent = [layer(exchange) for layer in own]
        assert [len(rows) for rows in sent] == list(exchange.counts)
        words = torch.full_like(expected, torch.nan)
        exchange.assemble(torch.cat(sent), words)
        total += words
        for layer, rows in zip(own, exchange.sort_by_owner(gradient).split(exchange.counts), strict=True):
            layer.backward_pass(exchange, rows)
    assert torch.equal(total, expected)
    torch.testing.assert_close(torch.cat([layer.weight.main_grad for layer in layers]), table.grad)


@pytest.mark.parametrize("pipelines", [1, 2])
def test_the_rows_of_every_owner_ascend_so_that_their_gradients_need_no_sort(pipelines):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (90,), generator=generator)
    shards = VocabShards(50, 3 * pipelines)
    for pipeline in range(pipelines):
        exchange = _planned(tokens, shards, pipelines, pipeline)
        for index in range(pipeline, shards.count, pipelines):
            owned = exchange.owned_by(index).tolist()
            assert owned == sorted(t for t in tokens.tolist() if shards.start(index) <= t < shards.start(index + 1))


def test_shards_cover_every_row_once_and_know_their_rows():
    for vocab in [*range(1, 40), 2047, 9000, 50257]:
        for count in range(1, 9):
            shards = VocabShards(vocab, count)
            rows = [shards.rows(index) for index in range(count)]
            assert _planned(torch.arange(vocab), shards).counts == tuple(rows)
            assert [shards.start(index) for index in range(count)] == [sum(rows[:index]) for index in range(count)]
            assert shards.start(count) == vocab


# Vocabularies as Megatron pads them, over numbers of ranks that are no powers of two, or do not divide them.
@pytest.mark.parametrize(
    ("vocab", "count", "rows"),
    [
        (151936, 16, 9536),
        (151936, 32, 4800),
        (256000, 24, 10688),
        (262144, 12, 21888),
        (129280, 6, 21568),
        (32000, 32, 1000),
        (50304, 1, 50304),
    ],
)
def test_shards_are_of_widths_that_vector_loads_and_gemms_like(vocab, count, rows):
    shards = VocabShards(vocab, count)
    assert shards.rows_per_shard == rows and not rows % (64 if rows >= 1024 else 8)
    assert all(shards.rows(index) % 8 == 0 for index in range(count))
    assert rows - vocab / count < (64 if rows >= 1024 else 8)
    assert sum(shards.rows(index) for index in range(count)) == vocab


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("size", [32000, 50257, 100352, 128256, 151936, 256000, 262144, 500])
def test_the_tensor_ranks_of_a_stage_hold_equally_many_rows(size, pipeline, tensor):
    """Otherwise their parameters lie at other places of the distributed optimizer's buffer."""
    padded = -(-size // (16 * tensor)) * 16 * tensor
    shards = VocabShards(padded, pipeline * tensor, tensor)
    assert shards.start(0) == 0 and shards.start(shards.count) == padded
    assert [shards.start(i + 1) - shards.start(i) for i in range(shards.count)] == list(
        map(shards.rows, range(shards.count))
    )
    for stage in range(pipeline):
        rows = {shards.rows(index) for index in range(stage * tensor, (stage + 1) * tensor)}
        assert len(rows) == 1 and max(rows) <= shards.rows_per_shard


@pytest.mark.parametrize("tensor", [1, 2])
def test_assigned_shards_cover_every_row_once(tensor):
    for seed in range(50):
        draw = random.Random(seed)
        rows = tuple(tensor * draw.choice((0, 0, 1, 3, 8, 17)) for _ in range(draw.randint(1, 6)))
        if not any(rows):
            continue
        shards = VocabShards(sum(rows), len(rows) * tensor, tensor, rows)
        assert [sum(shards.rows(stage * tensor + place) for place in range(tensor)) for stage in range(len(rows))] == (
            list(rows)
        )
        ends = [shards.start(index + 1) for index in range(shards.count)]
        assert [0, *ends[:-1]] == [shards.start(index) for index in range(shards.count)] and ends[-1] == sum(rows)
        assert shards.holders == tuple(stage for stage, each in enumerate(rows) if each)
        for place in range(tensor):
            owned = [shards.rows(stage * tensor + place) for stage in range(len(rows))]
            exchange = RowExchange(torch.arange(sum(rows)), shards, tensor, place)
            exchange.plan()
            assert exchange.counts == tuple(owned)
            for stage, each in enumerate(owned):
                index = stage * tensor + place
                assert exchange.owned_by(index).tolist() == [*range(shards.start(index), shards.start(index) + each)]


@pytest.mark.parametrize("seed", range(12))
def test_positions_are_sorted_by_owner_then_word_then_position(seed):
    """By the definition, token by token, with shards of other pipelines and ids that no shard owns."""
    draw = random.Random(seed)
    tensor, stages = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3, 5, 8, 20))
    rows = (*(tensor * draw.choice((0, 0, 1, 3, 8, 17)) for _ in range(stages - 1)), tensor)
    shards = VocabShards(sum(rows), stages * tensor, tensor, draw.choice((None, rows)))
    outside = draw.choice((0, 0, 3))
    ids = [draw.randint(-outside, shards.vocab_size - 1 + outside) for _ in range(draw.randint(1, 40))]
    ids += [draw.choice((-(2**40), 2**31, 2**40))] * (outside and draw.randint(0, 2))
    for place in range(tensor):
        owner = dict.fromkeys(range(shards.vocab_size), stages)
        for stage in range(stages):
            start = shards.start(stage * tensor + place)
            owner |= dict.fromkeys(range(start, start + shards.rows(stage * tensor + place)), stage)
        owners = [owner.get(token, stages + 1) for token in ids]
        words = [min(max(token, 0), shards.vocab_size - 1) for token in ids]
        exchange = RowExchange(torch.tensor(ids), shards, tensor, place)
        exchange.plan()
        assert exchange.order_n.tolist() == sorted(range(len(ids)), key=lambda k: (owners[k], words[k], k))
        assert exchange._counts.tolist() == [owners.count(each) for each in range(stages + 2)]


@pytest.mark.parametrize(
    ("rows", "tensor", "line"),
    [
        ((8, 8), 1, "gives rows for 2 pipeline ranks, but the pipeline has 3: give one number per rank"),
        ((24, 8, -8), 1, "has a negative number of rows: give 0 for a rank without rows"),
        ((0, 0, 0), 1, "adds up to 0 rows, but the padded vocabulary has 24: add 24"),
        ((8, 11, 5), 2, "cannot be divided equally among the 2 tensor ranks of a stage: give multiples of 2"),
        ((8, 8, 7), 1, "adds up to 23 rows, but the padded vocabulary has 24: add 1"),
        ((8, 8, 18), 2, "adds up to 34 rows, but the padded vocabulary has 24: remove 10"),
    ],
)
def test_rows_that_are_no_cut_are_refused(rows, tensor, line):
    with pytest.raises(UserError) as refused:
        VocabShards(24, 3 * tensor, tensor, rows)
    assert str(refused.value) == f"--vocab-shards {','.join(map(str, rows))} {line}"


def test_rows_that_tensor_ranks_cannot_share_are_refused():
    with pytest.raises(UserError, match="multiple of --tensor-model-parallel-size"):
        VocabShards(51, 4, 2)


def test_a_token_outside_the_vocabulary_is_refused():
    for token in (50, -1):
        with pytest.raises(UserError, match=f"token id {token} is outside the vocabulary of 50"):
            _planned(torch.tensor([3, token, 7]), VocabShards(50, 3)).counts  # noqa: B018
