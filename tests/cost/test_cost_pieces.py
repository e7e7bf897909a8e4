"""Test FLOPs, parameters, activations and layouts against values computed by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.constants import CALIBRATED
from megatron_vp.cost.hardware.gpus import HARDWARE, find_hardware
from megatron_vp.cost.layers.flops import model_flops, paper_flops
from megatron_vp.cost.layers.layer_operations import layer_flops, layer_weights
from megatron_vp.cost.layers.layouts import equal_layers, redistributed_layers
from megatron_vp.cost.layers.shapes import Job, ModelShape, Recompute
from megatron_vp.cost.paper.published import Cell, jobs
from megatron_vp.cost.ranks.communication import (
    LATENCY,
    NETWORK_LATENCY,
    CommunicationModel,
)
from megatron_vp.cost.ranks.layer_memory import layer_activations
from megatron_vp.errors import UserError
from megatron_vp.schedule import Channel, Placement
from megatron_vp.vocab.shards import VocabShards

A100 = replace(HARDWARE["a100"], rates=None)  # the paper's code


def gpt(**changes):
    return ModelShape(**{"layers": 32, "hidden": 3072, "heads": 24, "ffn": 12288, "vocab": 128000} | changes)


def job(model=None, **changes):
    return Job(model or gpt(), **{"sequence": 2048, "micro_batch": 1, "microbatches": 128, "pipeline": 8} | changes)


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
    assert layer_activations(job(**changes)) == pytest.approx(expected)


def test_dropout_keeps_two_masks_and_recomputation_the_input():
    assert layer_activations(job(gpt(dropout=True))) - layer_activations(job()) == 2 * 2048 * 3072
    assert layer_activations(job(recompute=Recompute.FULL)) == 2 * 2048 * 3072


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


def test_redistribution_over_a_v_takes_layers_from_rank_0():
    found = redistributed_layers(job(gpt(layers=64)), Placement.v_shape(8))
    loads = [found[rank] + found[15 - rank] for rank in range(8)]
    assert sum(loads) == 64 and loads[0] < min(loads[1:])


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


def test_messages_take_the_wires_between_their_ranks():
    # Four GPUs a stage: ranks 0 and 1 share a node of eight, rank 2 is on the next.
    communication = CommunicationModel(job(pipeline=3, tensor=4, sequence_parallel=True), A100)
    count = 2 * 2048 * 3072 / 4
    near, far = LATENCY + count / (0.7 * 300e9), NETWORK_LATENCY + count / (25e9 * CALIBRATED.network)
    forward, back = Channel.ACTIVATION, Channel.GRADIENT
    assert communication.messages(Placement.round_robin(3)) == pytest.approx(
        {(0, 1, forward): near, (1, 0, back): near, (1, 2, forward): far, (2, 1, back): far}
    )
    assert CommunicationModel(job(pipeline=2, tensor=4, context=2), A100).node(1) == 1
    assert set(communication.messages(Placement.v_shape(2))) == {
        (0, 1, forward),
        (1, 0, back),
        (1, 0, forward),
        (0, 1, back),
    }


def test_a_collective_between_nodes_crosses_the_network_once_per_node():
    communication = CommunicationModel(job(pipeline=32), A100)
    assert communication.nodes_of(range(communication.job.pipeline)) == 4
    assert communication.hops(32, 4) == pytest.approx(28 * LATENCY + 4 * NETWORK_LATENCY)
    assert communication.hops(8, 1) == pytest.approx(8 * LATENCY)
    network = 25e9 * CALIBRATED.network
    # Each of k nodes sends (k - 1) / k of the bytes on and as many back, whatever the number of its ranks.
    for ranks, nodes, share in ((16, 2, 1 / 2), (24, 3, 2 / 3), (32, 4, 3 / 4), (4, 4, 3 / 4), (2, 4, 1 / 2)):
        took = communication.all_reduce(8e9, ranks, nodes)
        assert took == pytest.approx(2 * (communication.hops(ranks, nodes) + share * 8e9 / network))
        assert communication.broadcast(8e9, ranks, nodes) == pytest.approx(
            communication.hops(ranks, nodes) + 8e9 / network
        )
    assert communication.hops(2, 4) == pytest.approx(2 * NETWORK_LATENCY)
