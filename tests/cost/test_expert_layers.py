"""Test which layers have experts, and what experts, latent attention and linear attention add to a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.job_sizes import expert_layers, job_of
from megatron_vp.cost.layers.layer_operations import distinct, layer_weights, operations
from megatron_vp.cost.layers.layer_types import stage_layers
from megatron_vp.cost.layers.shapes import Delta, Job, ModelShape, Recompute
from megatron_vp.cost.ranks.layer_memory import layer_memory
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.jobs.layout_text import layers_in

DEEPSEEK_V3 = {
    **{"num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128},
    **{"seq_length": 4096, "micro_batch_size": 1, "vocab_size": 129280, "padded_vocab_size": 129280, "swiglu": True},
    **{"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128},
    **{"qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "moe_router_topk": 8},
    **{"moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048, "moe_layer_freq": "([0]*3+[1]*58)"},
    **{"untie_embeddings_and_output_weights": True, "bf16": True},
}


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [
        (1, "1111"),
        (2, "1010"),
        ("3", "1001"),
        ([0, 1, 1, 0], "0110"),
        ("[0]*1 + [1]*3", "0111"),
        ("([0, 1]) * 2", "0101"),
        ("([0]*1+[1])*2", "0101"),
    ],
)
def test_every_way_to_say_which_layers_have_experts(frequency, layers):
    assert expert_layers(frequency, 4) == tuple(letter == "1" for letter in layers)


@pytest.mark.parametrize(
    "frequency",
    [
        *(0, "", "0.5", "[2]*4", "[[1]]*4", "__import__('os')", "[1]*10**9", "[0]*3", None),
        *("1+0+1+1", "[0 1]*2", "((([1]*9999)*9999)*9999)"),
    ],
)
def test_what_says_it_in_no_way_is_refused(frequency):
    with pytest.raises(UserError, match="moe_layer_freq"):
        expert_layers(frequency, 4)


def test_deepseek_v3_has_as_many_parameters_as_its_authors_say():
    """671 billion in all, of which a token meets 37: arXiv 2412.19437, without its multi-token prediction."""
    job = job_of(DEEPSEEK_V3)
    layers = stage_layers(job, (job.model.layers,))[0]
    assert layers == {"d": 3, "t": 58}
    vocabulary = 2 * job.model.vocab * job.model.hidden
    total = sum(count * layer_weights(job, kind) for kind, count in layers.items()) + vocabulary
    left_out = 58 * (256 - 8) * 3 * 7168 * 2048
    assert total == pytest.approx(671e9, rel=2e-3) and total - left_out == pytest.approx(37e9, rel=2e-2)


def test_the_first_stage_has_the_dense_layers():
    job = job_of({**DEEPSEEK_V3, "pipeline_model_parallel_size": 2, "global_batch_size": 2})
    first, last = stage_layers(job, (30, 31))
    assert first == {"d": 3, "t": 27} and last == {"t": 31}


@pytest.mark.parametrize(
    ("layout", "counts"), [("Et|tt|mL", [1, 2, 2]), ("Et|ttm|L", [1, 4, 0]), ("Ettt|m|L", [3, 2, 0])]
)
def test_a_prediction_head_is_on_the_stage_of_the_layout(layout, counts):
    """A head counts as a projection and a layer."""
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500, "seq_length": 32}
    parallel = {"pipeline_model_parallel_size": 3, "micro_batch_size": 1, "global_batch_size": 3}
    job = job_of({**sizes, **parallel, "mtp_num_layers": 1, "pipeline_model_parallel_layout": layout})
    assert [sum(stage.values()) for stage in stage_layers(job, layers_in(layout))] == counts


ROUTED = ModelShape(8, 2048, 16, 1024, 1000, gated=True, experts=16, experts_per_token=4)


def job(model=ROUTED, **changes):
    sizes = {"sequence": 4096, "micro_batch": 1, "microbatches": 1, "pipeline": 1, "layers": LayerKind.ENGINE}
    return Job(model, **sizes | changes)


def test_a_token_goes_to_as_many_places_as_its_experts_fall_into():
    assert distinct(1, 4) == 1 / 4 and distinct(10**6, 4) == pytest.approx(1, rel=1e-5)
    assert distinct(2, 2) == (1 + 1 / 2) / 2  # two places in one case of two


def test_a_dispatcher_that_is_not_said_is_the_flexible_one_between_nodes():
    sizes = [(8, 1), (16, 1), (4, 2), (8, 2)]
    found = [job(data=64, tensor=t, expert=e, dispatcher="").is_flexible for e, t in sizes]
    assert found == [False, True, False, True]
    assert not job(data=64, expert=16).is_flexible
    assert job(data=64, expert=8, dispatcher="flex").is_flexible


H, S = 2048, 4096


def test_a_layer_with_experts_waits_for_its_launches():
    hardware, small = HARDWARE["h100"], job(sequence=512)
    launches = hardware.rates.launches

    def layer(each):
        forward, *backward = PassTimes(each, hardware).layer()
        return forward / launches, sum(backward) / launches

    assert layer(small) == pytest.approx((1, 2))
    assert layer(replace(small, recompute=Recompute.FULL)) == pytest.approx((1, 3))
    assert max(layer(replace(small, graphs="full_iteration"))) < 1
    assert max(layer(replace(small, model=replace(ROUTED, experts=0, experts_per_token=1)))) < 1
    assert layer(replace(small, micro_batch=64)) == layer(replace(small, micro_batch=64, graphs="full_iteration"))


def test_nccls_all_to_all_is_slower_than_its_rings():
    hardware, exchange = HARDWARE["h100"], job(data=16, expert=16)
    as_rings = replace(hardware, rates=replace(hardware.rates, all_to_all=1.0))
    slow, fast = (PassTimes(exchange, each).dispatch(64e6, 4) for each in (hardware, as_rings))
    assert slow / fast == pytest.approx(1 / hardware.rates.all_to_all, rel=0.03)


def test_capacity_factors_change_what_experts_compute_and_keep():
    values = {"num_layers": 8, "hidden_size": H, "num_attention_heads": 16, "vocab_size": 1000, "seq_length": S}
    values |= {
        "micro_batch_size": 1,
        "num_experts": 16,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 1024,
        "bf16": True,
    }
    plain, dropped, padded, roomy, paged = (
        job_of(values | more)
        for more in (
            {},
            {"moe_expert_capacity_factor": 0.5},
            {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
            {"moe_expert_rank_capacity_factor": 1.5},
            {"moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True},
        )
    )

    def up(one):
        return next(op for op in operations(one) if op.name == "up")

    assert [up(each).matrix.tokens / up(plain).matrix.tokens for each in (dropped, padded, roomy)] == [0.5, 1.5, 1]
    assert [sum(up(each).keeps) / sum(up(plain).keeps) for each in (dropped, padded, roomy)] == [0.5, 1.5, 1.5]
    assert sum(up(paged).keeps) == pytest.approx(1.1 * sum(up(plain).keeps))
    stashing, keeping = (PassTimes(replace(each, graphs="full_iteration"), HARDWARE["h100"]) for each in (paged, roomy))
    assert stashing.layer().F > keeping.layer().F


def test_gated_delta_nets_replace_attention_in_some_layers():
    values = {"num_layers": 8, "hidden_size": H, "num_attention_heads": 16, "vocab_size": 1000, "seq_length": S}
    values |= {"micro_batch_size": 1, "bf16": True, "pipeline_model_parallel_size": 2}
    mixed = job_of(values | {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4})
    assert mixed.model.pattern == "gggtgggt" and mixed.model.delta == Delta(16, 32, 128, 128, 4)
    assert not mixed.model.is_hybrid
    weights = H * (4 * 16 * 128 + 2 * 32 * 128 - 2 * 16 * 128 + 2 * 32) + 4 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * H
    assert layer_weights(mixed, "G") == weights + 2 * H
    memory = layer_memory(mixed, HARDWARE["h100"], False, "g")
    assert (
        memory.kept > 0
        and PassTimes(mixed, HARDWARE["h100"]).layer("g").F < PassTimes(mixed, HARDWARE["h100"]).layer("t").F * 1.5
    )
