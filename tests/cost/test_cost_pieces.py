"""Test FLOPs, parameters, activations and layouts against values computed by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE, find_hardware
from megatron_vp.cost.layers.flops import model_flops, paper_flops
from megatron_vp.cost.layers.layer_operations import layer_flops, layer_weights, operations
from megatron_vp.cost.layers.layouts import equal_layers, redistributed_layers
from megatron_vp.cost.layers.shapes import Job, ModelShape, Recompute
from megatron_vp.cost.paper.published import Cell, jobs
from megatron_vp.cost.ranks.layer_memory import layer_memory
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.vocab.shards import VocabShards


def gpt(**changes):
    return ModelShape(**{"layers": 32, "hidden": 3072, "heads": 24, "ffn": 12288, "vocab": 128000} | changes)


def job(model=None, **changes):
    return Job(model or gpt(), **{"sequence": 2048, "micro_batch": 1, "microbatches": 128, "pipeline": 8} | changes)


def kept(one):
    return layer_memory(one, HARDWARE["h100"], False).kept


def test_flops_are_the_paper_s():
    s, h, layers, vocab = 2048, 3072, 32, 128000
    one = 8 * s * h * h + 4 * s * s * h + 4 * s * h * 4 * h
    assert layer_flops(job()) == one
    assert paper_flops(job()) == 128 * 3 * (2 * s * h * vocab + layers * one)


def test_tensor_parallelism_and_experts_share_the_work():
    whole, half = job(), job(tensor=2)
    assert layer_flops(half) == layer_flops(whole) / 2
    assert model_flops(half) == model_flops(whole) and paper_flops(half) == paper_flops(whole)
    experts = job(gpt(experts=8, experts_per_token=2))
    router = 2 * 2048 * 3072 * 8
    assert layer_flops(experts) == layer_flops(whole) + 4 * 2048 * 3072 * 12288 + router
    # Eight times the MLP's weights on one rank, twice where four ranks share them.
    assert layer_weights(experts) - layer_weights(whole) == 7 * 2 * 3072 * 12288 + 3072 * 8
    shared = job(gpt(experts=8, experts_per_token=2), data=4, expert=4)
    assert layer_weights(shared) - layer_weights(whole) == 2 * 3072 * 12288 + 3072 * 8
    assert layer_flops(shared) == layer_flops(experts)


def test_grouped_queries_and_gates_change_the_weights():
    llama = ModelShape(32, 4096, 32, 14336, 128256, kv_groups=8, gated=True)
    assert layer_weights(job(llama)) == 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 4 * 4096


@pytest.mark.parametrize(
    ("changes", "per_unit"),
    [({}, 32), ({"tensor": 2}, 8 + 24 / 2), ({"tensor": 2, "sequence_parallel": True}, 32 / 2)],
)
def test_activations_of_a_plain_layer(changes, per_unit):
    statistics = 4 * 24 / changes.get("tensor", 1) / 3072
    expected = (per_unit + statistics) * 2048 * 3072
    assert kept(job(**changes)) == pytest.approx(expected)


def test_dropout_keeps_two_masks_and_recomputation_the_input():
    assert kept(job(gpt(dropout=True))) - kept(job()) == 2 * 2048 * 3072
    assert kept(job(recompute=Recompute.FULL)) == 2 * 2048 * 3072


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("vocab", [5, 40, 1001, 8191, 50257, 129280, 151936, 256000])
def test_shards_are_those_that_a_run_cuts(vocab, tensor):
    planned = job(gpt(vocab=vocab), tensor=tensor)
    shards = VocabShards(vocab, planned.pipeline * tensor)
    assert planned.shard_rows == shards.rows_per_shard
    assert planned.shard_imbalance == pytest.approx(shards.rows(0) * shards.count / vocab - 1)


def test_redistributed_layers_are_the_published_ones():
    last = {32: 4, 64: 3, 128: 2, 256: 0}
    for vocab_k, layers in last.items():
        found = redistributed_layers(jobs()[Cell(5, 8, 2048, "redis", vocab_k)])
        assert found[-1] == layers and sum(found) == 32 and list(found[:-1]) == sorted(found[:-1])
    assert redistributed_layers(jobs()[Cell(5, 8, 2048, "redis", 256)]) == (4, 4, 4, 5, 5, 5, 5, 0)


def test_what_cannot_be_split_is_one_line():
    for call in (
        lambda: equal_layers(job(), 7),
        lambda: redistributed_layers(job(gpt(layers=6))),
        lambda: job(tensor=5),
        lambda: ModelShape(1, 10, 3, 1, 1),
        lambda: gpt(kv_groups=5),
        lambda: gpt(experts=2, experts_per_token=3),
        lambda: job(gpt(kv_groups=3), tensor=2),
        lambda: job(sequence=2046, tensor=4, sequence_parallel=True),
        lambda: job(expert=2),
        lambda: job(gpt(experts=4, experts_per_token=1), data=3, expert=2),
        lambda: find_hardware("h1000"),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert "\n" not in str(error.value)
    assert find_hardware("H100").peak_flops == 989.4e12 and find_hardware("mi300") is HARDWARE["mi300x"]


H100 = HARDWARE["h100"]
MODEL = ModelShape(layers=8, hidden=2048, heads=16, ffn=8192, vocab=1000)
PUBLISHED = {  # arXiv 2407.08608, heads of 128, causal forward, TFLOP/s: cuDNN 9, FlashAttention 3, FlashAttention 2
    2048: (484, 521, 298),
    4096: (518, 579, 319),
    8192: (529, 602, 333),
    16384: (539, 616, 335),
}


def attention_job(sequence=4096, model=MODEL, **changes):
    return Job(model, sequence, 1, microbatches=1, pipeline=1, layers=LayerKind.ENGINE, **changes)


def attention_flops(one):
    return sum(op.scores for op in operations(one))


def times(one, hardware=H100):
    return PassTimes(one, hardware).attention(attention_flops(one))


@pytest.mark.parametrize("sequence", PUBLISHED)
def test_rates_are_published_ones(sequence):
    newest, old = attention_job(sequence), attention_job(sequence, flash_attention_2=1.0)
    flops = attention_flops(newest) / 2
    cudnn, third, second = PUBLISHED[sequence]
    assert flops / times(newest)[0] / 1e12 == pytest.approx((cudnn + third) / 2, rel=0.03)
    assert flops / times(old)[0] / 1e12 == pytest.approx(second, rel=0.04)
    assert times(old)[1] > 1.5 * times(newest)[1]
    either = times(attention_job(sequence, flash_attention_2=0.5))
    for each, one, other in zip(either, times(old), times(newest), strict=True):
        assert each == pytest.approx((one + other) / 2)


def test_narrow_heads_are_slower():
    """Published at 16384: 497 for heads of 64, 648 of 128, no mask."""
    narrow = replace(MODEL, heads=32, head_size=64)
    assert times(attention_job(16384))[0] / times(attention_job(16384, narrow))[0] == pytest.approx(497 / 648, rel=0.05)
