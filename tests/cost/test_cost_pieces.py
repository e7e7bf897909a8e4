"""Test FLOPs, parameters, activations and layouts against values computed by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.constants import CALIBRATED
from megatron_vp.cost.hardware.gpus import HARDWARE, find_hardware
from megatron_vp.cost.layers.flops import model_flops, paper_flops
from megatron_vp.cost.layers.layer_operations import Matrix, layer_flops, layer_weights, operations
from megatron_vp.cost.layers.layouts import equal_layers, redistributed_layers
from megatron_vp.cost.layers.shapes import Job, ModelShape, Recompute
from megatron_vp.cost.paper.published import Cell, jobs
from megatron_vp.cost.ranks.communication import (
    CONTENTION,
    EXPOSED_SUM,
    LATENCY,
    NETWORK_LATENCY,
    CommunicationModel,
)
from megatron_vp.cost.ranks.layer_memory import layer_activations, layer_memory
from megatron_vp.cost.ranks.pass_times import OWN_SHARE, PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import Channel, CollectiveKind, Placement, VocabMethod
from megatron_vp.vocab.shards import VocabShards

A100 = replace(HARDWARE["a100"], rates=None)  # the paper's code


def gpt(**changes):
    return ModelShape(**{"layers": 32, "hidden": 3072, "heads": 24, "ffn": 12288, "vocab": 128000} | changes)


def job(model=None, **changes):
    return Job(model or gpt(), **{"sequence": 2048, "micro_batch": 1, "microbatches": 128, "pipeline": 8} | changes)


def mlp_traffic(model):
    return model.layer_traffic() - model.tensor_sum


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


def test_activations_of_grouped_queries_and_gates():
    llama = ModelShape(32, 4096, 32, 14336, 128256, kv_groups=8, gated=True)
    attention, mlp = 2 * (2 * 4096 + 2 * 1024) + 4 * 32, 2 * 3 * 14336
    assert layer_activations(job(llama)) == 2048 * (8 * 4096 + attention + mlp)


def test_dropout_keeps_two_masks_and_recomputation_the_input():
    assert layer_activations(job(gpt(dropout=True))) - layer_activations(job()) == 2 * 2048 * 3072
    assert layer_activations(job(recompute=Recompute.FULL)) == 2 * 2048 * 3072


def test_the_last_shard_of_a_vocabulary_may_be_shorter():
    assert job(gpt(vocab=1001)).shard_rows == 128 and job(gpt(vocab=1001), tensor=2).whole_rows == 501


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


def test_vocabulary_passes_share_the_whole_layer_s_work():
    times = PassTimes(job(), A100)
    whole = sum(times.whole_output())
    for method in (VocabMethod.VOCAB_1, VocabMethod.VOCAB_2):
        assert whole < 8 * sum(times.output_shard(method)) < 1.3 * whole
    early, late = (times.output_shard(method) for method in (VocabMethod.VOCAB_2, VocabMethod.VOCAB_1))
    assert early[0] > early[1] and late[0] < late[1]


def test_a_fused_cross_entropy_moves_less_in_a_whole_output_layer_alone():
    eager, native, engine = (PassTimes(job(cross_entropy=each), A100) for each in ("eager", "native", "te"))
    logits = 2048 * 128000
    for fused, forward, backward in ((native, 22, 10), (engine, 6, 4)):
        found, before = fused.whole_output(), eager.whole_output()
        assert pytest.approx(eager.memory_time((38 - forward) * logits)) == before.F - found.F
        assert pytest.approx(eager.memory_time((14 - backward) * logits)) == before.B - found.B
        assert found.W == before.W
        shards = (each.output_shard(VocabMethod.VOCAB_1) for each in (fused, eager))
        assert next(shards) == next(shards)


def test_small_products_wait_for_memory():
    narrow = PassTimes(job(gpt(vocab=8), sequence=8), A100)
    flops = 2 * 8 * 3072 * 8
    assert 3 * flops / (A100.peak_flops * CALIBRATED.matrix) < narrow.whole_output().F
    copied = narrow.gemm_time(Matrix(8, 16, tokens=1, copies=1000))
    assert copied == narrow.memory_time(2 * 1000 * (8 + 16 + 8 * 16))
    assert narrow.memory_time(2 * 2 * 2048 * 3072) == PassTimes(job(), A100).whole_embedding().F


def test_recomputation_repeats_the_forward_and_sequence_parallelism_shares_what_is_no_product():
    changes = ({}, {"recompute": Recompute.FULL}, {"sequence_parallel": True})
    plain, again, shared = (PassTimes(job(tensor=2, **each), A100).layer() for each in changes)
    sums = CommunicationModel(job(tensor=2), A100).layer_traffic()
    assert sums > 0 and pytest.approx((plain.F, plain.B + plain.F + sums, plain.W)) == (again.F, again.B, again.W)
    own = OWN_SHARE * CALIBRATED.layer_bytes * 2048 * 3072
    half = PassTimes(job(), A100).memory_time(own / 2)
    assert pytest.approx(half) == plain.F - shared.F and pytest.approx(2 * half) == plain.B - shared.B


def test_pipelines_side_by_side_share_the_words_and_wait_for_their_tensor_ranks():
    alone, tensor = job(), job(tensor=8, sequence_parallel=True, pipeline=16)
    launched = replace(A100, constants=replace(CALIBRATED, gap=0.0))
    one, eighth = (PassTimes(each, launched).embedding_shard() for each in (alone, tensor))
    assert eighth[0] == pytest.approx(one[0] / 8) and eighth[1] < one[1] / 8
    communication, pipelines = (
        CommunicationModel(tensor, A100),
        CommunicationModel(job(pipeline=16), A100),
    )
    method = VocabMethod.VOCAB_1
    rows = [
        each.collectives(method)[CollectiveKind.EMBED_GRAD] - each.hops(16, nodes)
        for each, nodes in ((communication, 16), (pipelines, 2))
    ]
    assert rows[0] == pytest.approx(rows[1] / 8)
    # X is gathered from the tensor ranks of a stage and its gradient scattered: together a sum over them.
    took, messages = communication.collectives(method), communication.broadcast(communication.hidden_bytes, 16, 16)
    extra = [took[kind] - messages for kind in (CollectiveKind.C0, CollectiveKind.C2)]
    assert (
        extra == pytest.approx([communication.tensor_sum / 2] * 2)
        and communication.tensor_sum > 0 == pipelines.tensor_sum
    )
    assert took[CollectiveKind.EMBED] == pytest.approx(took[CollectiveKind.EMBED_GRAD] + communication.tensor_sum)
    early = communication.collectives(VocabMethod.VOCAB_2)[CollectiveKind.C1]
    assert early == pytest.approx(took[CollectiveKind.C1] + took[CollectiveKind.C2])


def test_a_ring_moves_all_but_an_own_part_twice_and_experts_exchange_what_is_not_theirs():
    communication = CommunicationModel(job(), A100)
    took = communication.all_reduce(8e9, 4, nodes=1)
    assert took == pytest.approx(2 * (4 * LATENCY + 6e9 / communication.bandwidth(True)))
    spread = CommunicationModel(job(gpt(experts=8, experts_per_token=2), data=4, expert=4), A100)
    # Tokens go to two experts each and come back; three of four experts are on other ranks.
    moved = 2 * spread.whole_hidden_bytes * 3 / 4
    assert spread.layer_traffic() == pytest.approx(2 * (LATENCY + moved / spread.bandwidth(True)))


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


def test_what_stays_in_a_node_takes_its_links():
    one, two = (CommunicationModel(job(pipeline=p), A100) for p in (8, 9))
    assert (one.nodes_of(range(8)), two.nodes_of(range(9))) == (1, 2)
    assert one.collectives(VocabMethod.VOCAB_1)[CollectiveKind.C1] == one.all_reduce(3 * 4 * 2048, 8, nodes=1)
    node = CommunicationModel(job(tensor=8), A100)
    assert node.tensor_sum == node.all_reduce(2 * 2048 * 3072, 8, nodes=1)
    assert node.layer_traffic() == 2 * node.tensor_sum
    wider = CommunicationModel(job(tensor=8, context=2), A100)
    assert wider.tensor_sum == wider.all_reduce(2 * 1024 * 3072, 8, nodes=1)  # tensor ranks are innermost
    overlapped = replace(node, job=replace(node.job, tensor_overlap=True))
    assert overlapped.tensor_sum == pytest.approx(EXPOSED_SUM * node.tensor_sum)
    experts = CommunicationModel(job(gpt(experts=8, experts_per_token=2), tensor=4, data=4, expert=4), A100)
    # Two experts a token, four ranks on two nodes: one copy in two goes over the network, one in four stays near.
    moved = experts.whole_hidden_bytes * 2 / 4
    far, near = moved / 2 / experts.bandwidth(False), moved / 4 / experts.bandwidth(True)
    gathered = experts.all_reduce(4 * moved, 4, nodes=1)
    exchange = 2 * (NETWORK_LATENCY + far + near)
    assert experts.layer_traffic() == pytest.approx(experts.tensor_sum + gathered + exchange)
    assert mlp_traffic(experts) == pytest.approx(gathered + exchange)
    # The flexible dispatcher sends to a node once for both experts, to a rank as well, and both at the same time.
    flexible = replace(experts, job=replace(experts.job, dispatcher="flex"))
    once = 2 * (NETWORK_LATENCY + 0.75 * far)
    assert mlp_traffic(flexible) == pytest.approx(gathered + once)
    assert 0.75 * far > 0.875 * moved / 2 / experts.bandwidth(True)
    hidden = replace(experts, job=replace(experts.job, expert_overlap=True))
    assert mlp_traffic(hidden) == pytest.approx(gathered + CONTENTION * exchange)
    alone = replace(hidden, job=replace(hidden.job, expert=1, expert_tensor=1))
    assert alone.layer_traffic() == pytest.approx(experts.tensor_sum)


def test_replicas_sum_what_they_share():
    # Each expert is on two of the four replicas of a stage, which are four of a node's GPUs.
    sizes = {"data": 2, "context": 2, "expert": 2}
    communication = CommunicationModel(job(gpt(experts=8, experts_per_token=2), **sizes), A100)
    expected = communication.all_reduce(4 * 1e9, 4, nodes=1) + communication.all_reduce(4 * 3e8, 2, nodes=1)
    assert communication.gradient_sync(1e9, 3e8) == pytest.approx(expected)
    narrow = CommunicationModel(replace(communication.job, wide_gradients=False), A100)
    assert narrow.gradient_sync(1e9, 0) == pytest.approx(communication.all_reduce(2 * 1e9, 4, nodes=1), rel=1e-3)
    # A distributed optimizer gathers parameters in place of gradients; behind passes, a part remains.
    shared = replace(communication, job=replace(communication.job, distributed_optimizer=True))
    assert shared.gradient_sync(1e9, 3e8) == pytest.approx(0.75 * expected, rel=1e-3)
    hidden = replace(shared, job=replace(shared.job, data_overlap=True, gather_overlap=True))
    assert hidden.gradient_sync(1e9, 3e8, 0, 9.0, 9.0) == pytest.approx(CONTENTION * shared.gradient_sync(1e9, 3e8))
    assert hidden.gradient_sync(1e9, 3e8) == pytest.approx(shared.gradient_sync(1e9, 3e8))


def test_each_flag_hides_its_own_half_and_an_all_reduce_belongs_to_the_backward():
    def seconds(**settings):
        made = job(data=8, distributed_optimizer=True, layers=LayerKind.ENGINE)
        return CommunicationModel(replace(made, **settings), A100).gradient_sync(1e9, 0, 0, 9.0, 9.0)

    exposed = seconds()
    sums, gathers = exposed * 4 / 6, exposed * 2 / 6  # in fp32, and in 16 bits
    assert seconds(data_overlap=True) == pytest.approx(CONTENTION * sums + gathers, rel=1e-3)
    assert seconds(gather_overlap=True) == pytest.approx(sums + CONTENTION * gathers, rel=1e-3)
    alone = seconds(distributed_optimizer=False)
    assert seconds(distributed_optimizer=False, data_overlap=True) == pytest.approx(CONTENTION * alone)
    assert seconds(distributed_optimizer=False, gather_overlap=True) == alone


def test_each_of_a_nodes_replicas_has_its_own_port():
    wide, tall = (CommunicationModel(job(data=16 // t, tensor=t), A100) for t in (1, 8))
    near, far = wide.bandwidth(True), wide.bandwidth(False)
    assert wide.replicas_sum(1e9, 16, 16) - wide.hops(16, 2) == pytest.approx(1e9 * 15 / 16 / min(near, 8 * far))
    assert tall.replicas_sum(1e9, 2, 16) - tall.hops(2, 2) == pytest.approx(1e9 / 2 / far)


def test_keys_and_values_of_other_context_ranks_are_waited_for_where_attention_is_short():
    ring = CommunicationModel(job(tensor=8, context=2), A100)
    hop = NETWORK_LATENCY + 2 * 2 * 1024 * 3072 / 8 / ring.bandwidth(False)
    assert ring.exposed_keys(0.0) == pytest.approx(hop)
    assert ring.exposed_keys(hop) == pytest.approx(hop / 2)
    assert ring.exposed_keys(2 * hop) == 0
    assert CommunicationModel(job(), A100).exposed_keys(0.0) == 0


def test_fused_layers_move_what_is_counted_and_local_attention_all_scores():
    engine, local, paper = (
        PassTimes(job(sequence_parallel=True, layers=kind), HARDWARE["h100"])
        for kind in (LayerKind.ENGINE, LayerKind.LOCAL, LayerKind.PAPER)
    )

    def moved(times):
        found = operations(times.job)
        return sum(op.moved for op in found) + times.fitted_bytes(found)

    assert moved(engine) == moved(local) < 0.5 * moved(paper)
    assert local.layer().F > engine.layer().F
    assert moved(PassTimes(local.job, HARDWARE["cpu"])) == pytest.approx(moved(paper))


def recomputing(*modules, **changes):
    """What a layer of H100s keeps, what its backward needs for a moment, and its times, `modules` computed again."""
    one = job(recompute_modules=frozenset(modules), layers=LayerKind.ENGINE, **changes)
    memory, times = layer_memory(one, split=False), PassTimes(one, HARDWARE["h100"]).layer()
    return memory.kept, memory.backward, times.B, times


def test_an_mlp_that_is_computed_again_keeps_its_input_alone():
    llama = ModelShape(32, 4096, 32, 14336, 128256, kv_groups=8, gated=True)
    whole, again = recomputing(model=llama), recomputing("mlp", model=llama)
    dropped = 2048 * (2 * 4096 + 2 * 3 * 14336)  # the norm's result, the first product, and the second one's input
    assert (whole[0] - again[0], again[1] - whole[1]) == (dropped, dropped)
    times = PassTimes(job(llama, layers=LayerKind.ENGINE), HARDWARE["h100"])
    products = sum(times.gemm_time(op.matrix) for op in operations(times.job) if op.name in ("up", "down"))
    assert again[2] - whole[2] == pytest.approx(products + times.memory_time(2048 * 2 * 3 * 14336))
    assert (again[3].F, again[3].W) == (whole[3].F, whole[3].W)
    # Local layers keep the norm's result, their MLP's input. Without experts nothing else changes.
    local = [
        layer_activations(job(llama, recompute_modules=frozenset(each), layers=LayerKind.LOCAL))
        for each in ((), ("mlp",))
    ]
    assert local[0] - local[1] == 2048 * 2 * 3 * 14336
    assert recomputing("moe", "moe_act", "layernorm", model=llama) == whole
    assert recomputing("mlp", model=llama, recompute=Recompute.FULL) == recomputing(
        model=llama, recompute=Recompute.FULL
    )


def test_experts_compute_their_activation_or_everything_again():
    routed = gpt(experts=8, experts_per_token=2, gated=True)
    changes = {"model": routed, "tensor": 2, "sequence_parallel": True}
    whole, activation, everything = (recomputing(*each, **changes) for each in ((), ("moe_act",), ("moe",)))
    inner = 2 * 2048 * 2 * 12288 / 2
    assert (whole[0] - activation[0], activation[1] - whole[1]) == (inner, inner)
    hidden = 2 * 2048 * 3072 / 2  # one of two copies of a token; the norm's result stays in place of the other
    assert (whole[0] - everything[0], everything[1] - whole[1]) == (3 * inner + hidden, 3 * inner + hidden)
    assert whole[2] < activation[2] < everything[2] and whole[3].F == everything[3].F
    assert recomputing("mlp", **changes) == whole
    offset = recomputing("moe_act", glu_intermediates=2, **changes)
    assert recomputing(glu_intermediates=2, **changes)[0] - offset[0] == 3 * inner


def test_experts_that_are_computed_again_keep_nothing_of_their_shared_expert():
    kept = [recomputing("moe", model=gpt(experts=8, experts_per_token=2, shared_ffn=ffn))[0] for ffn in (0, 4096)]
    assert kept[0] == kept[1]
