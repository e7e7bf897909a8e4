"""Test what options of published recipes add to a layer, or spare, against counts by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.fp8 import quantised
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.layer_operations import layer_weights, operations
from megatron_vp.cost.layers.layer_types import model_layers, stage_layers
from megatron_vp.cost.layers.shapes import Delta, Fp8Recipe, Job, Latent, ModelShape
from megatron_vp.cost.ranks.layer_memory import layer_activations, layer_memory
from megatron_vp.cost.ranks.pass_times import LAUNCHES, PassTimes
from megatron_vp.cost.ranks.rank_memory import SHARED_BUFFERS, MemoryModel
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import generate

H100, B200 = HARDWARE["h100"], HARDWARE["b200"]
H, S = 2048, 4096
MODEL = ModelShape(8, H, 16, 8192, 64000, kv_groups=4, gated=True)
ROUTED = replace(MODEL, ffn=1024, experts=16, experts_per_token=4)
LATENT = replace(MODEL, kv_groups=16, latent=Latent(256, 64, 128, 512), head_size=192, rotary=True)


def job(model=MODEL, **changes):
    return Job(model, **{"sequence": S, "micro_batch": 1, "microbatches": 8, "pipeline": 4} | changes | ENGINE)


ENGINE = {"layers": LayerKind.ENGINE}


def again(model, *modules):
    """What a layer keeps less, and the seconds that its backward takes longer, if `modules` are recomputed."""
    plain, other = job(model), job(model, recompute_modules=frozenset(modules))
    took = [PassTimes(each, H100).layer() for each in (plain, other)]
    assert (took[0].F, took[0].W) == (took[1].F, took[1].W)
    return layer_activations(plain) - layer_activations(other), took[1].B - took[0].B


def test_core_attention_that_is_repeated_keeps_no_statistics():
    freed, longer = again(MODEL, "core_attn")
    (core,) = (op for op in operations(job()) if op.scores)
    assert freed == S * 4 * 16 and longer == pytest.approx(PassTimes(job(), H100).operation(core).F)


def test_repeated_up_projections_keep_no_queries_keys_and_values():
    freed, longer = again(LATENT, "mla_up_proj")
    assert freed == 2 * S * (16 * 192 + 16 * 192 + 16 * 128 + 512 + 256)
    times = PassTimes(job(LATENT), H100)
    repeated = [op for op in operations(times.job) if op.name in ("q up", "kv up", "split")]
    assert len(repeated) == 3 and longer == pytest.approx(sum(times.operation(op).F for op in repeated))
    assert again(MODEL, "mla_up_proj") == (0, 0)


def test_norms_are_repeated_where_they_are_not_fused():
    """Transformer Engine fuses the norms of a dense layer, but not those of experts and of latent attention."""
    one = 2 * S * H
    assert [again(model, "layernorm")[0] for model in (MODEL, ROUTED, LATENT)] == [0, one, one]


def test_a_prediction_head_has_a_projection_and_logits_of_its_own():
    model = replace(MODEL, mtp_heads=("t",), behind_mtp=0)
    assert model_layers(job(model)) == {"t": 9, "m": 1} and stage_layers(job(model), (2,) * 4)[3]["m"] == 1
    assert layer_weights(job(model), "m") == 2 * H * H + 6 * H
    for vocab in ("none", "vocab-2"):
        plain, heads = (
            MemoryModel(job(each), generate("1f1b", 4, 8, vocab=vocab), (2,) * 4, H100) for each in (MODEL, model)
        )
        more = heads.parameters(3) - plain.parameters(3) - layer_weights(job(model)) - layer_weights(job(model), "m")
        assert more == (64000 * H if vocab == "none" else 0)  # the embedding of the further tokens
        if vocab == "vocab-2":
            assert heads.rank(1).vocabulary == 2 * plain.rank(1).vocabulary > 2 * SHARED_BUFFERS * S * H
        else:
            assert heads.rank(3).vocabulary - plain.rank(3).vocabulary == 4 * S * 64000


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
    assert PassTimes(paged, H100).layer().F > PassTimes(roomy, H100).layer().F


def test_fp4_takes_half_the_bytes_of_fp8_and_runs_only_where_its_rate_is_known():
    found = quantised(Fp8Recipe.NVFP4, B200)
    assert (found.moved, found.kept) == (4 + 2 * 0.5625, 2 * 0.5625)
    four, eight = (PassTimes(job(fp8=each), B200).layer() for each in (Fp8Recipe.NVFP4, Fp8Recipe.MXFP8))
    assert four.W < eight.W


def test_an_output_layer_in_fp8_and_a_graph_of_the_whole_iteration_are_faster():
    narrow = {"fp8": Fp8Recipe.MXFP8}
    assert PassTimes(job(**narrow, fp8_output=True), B200).whole_output().W < PassTimes(job(), B200).whole_output().W
    eager, whole = (PassTimes(job(ROUTED, graphs=each), H100).layer() for each in ("none", "full_iteration"))
    assert pytest.approx((LAUNCHES, 2 * LAUNCHES)) == (eager.F - whole.F, eager.B - whole.B)


def test_muon_keeps_one_state_less_and_multiplies_five_times():
    plain, muon = (MemoryModel(job(muon=steps), generate("1f1b", 4, 8), (2,) * 4, H100) for steps in (0, 5))
    matrices = 2 * sum(op.matrix.weights for op in operations(job()) if op.matrix)
    assert plain.rank(1).optimizer - muon.rank(1).optimizer == pytest.approx(4 * matrices, rel=1e-3)
    shapes = [sorted(op.matrix[:2]) for op in operations(job()) if op.matrix]
    assert muon.muon(1)[1] == 2 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in shapes)


def test_tensors_that_are_offloaded_leave_the_device():
    plain, moved = job(ROUTED), job(ROUTED, offloaded_modules=frozenset({"moe_act"}))
    assert layer_activations(plain) - layer_activations(moved) == 2 * S * 4 * 1024 * 2


def test_gated_delta_nets_replace_attention_in_some_layers():
    values = {"num_layers": 8, "hidden_size": H, "num_attention_heads": 16, "vocab_size": 1000, "seq_length": S}
    values |= {"micro_batch_size": 1, "bf16": True, "pipeline_model_parallel_size": 2}
    mixed = job_of(values | {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4})
    assert mixed.model.pattern == "gggtgggt" and mixed.model.delta == Delta(16, 32, 128, 128, 4)
    assert not mixed.model.is_hybrid
    weights = H * (4 * 16 * 128 + 2 * 32 * 128 - 2 * 16 * 128 + 2 * 32) + 4 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * H
    assert layer_weights(mixed, "G") == weights + 2 * H
    memory = layer_memory(mixed, False, "g")
    assert memory.kept > 0 and PassTimes(mixed, H100).layer("g").F < PassTimes(mixed, H100).layer("t").F * 1.5
