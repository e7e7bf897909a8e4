"""Test what options of published recipes add to a layer, or spare, against counts by hand."""

from dataclasses import replace

import pytest

from megatron_vp.cost.hardware.gpus import HARDWARE
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.layer_operations import layer_weights, operations
from megatron_vp.cost.layers.layer_types import model_layers, stage_layers
from megatron_vp.cost.layers.shapes import Delta, Job, ModelShape
from megatron_vp.cost.ranks.layer_memory import layer_memory
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.cost.ranks.rank_memory import SHARED_BUFFERS, MemoryModel
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule import generate

H100, B200 = HARDWARE["h100"], HARDWARE["b200"]
H, S = 2048, 4096
MODEL = ModelShape(8, H, 16, 8192, 64000, kv_groups=4, gated=True)


def job(model=MODEL, **changes):
    return Job(model, **{"sequence": S, "micro_batch": 1, "microbatches": 8, "pipeline": 4} | changes | ENGINE)


ENGINE = {"layers": LayerKind.ENGINE}


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


def test_muon_keeps_one_state_less_and_multiplies_five_times():
    plain, muon = (MemoryModel(job(muon=steps), generate("1f1b", 4, 8), (2,) * 4, H100) for steps in (0, 5))
    matrices = 2 * sum(op.matrix.weights for op in operations(job()) if op.matrix)
    assert plain.rank(1).optimizer - muon.rank(1).optimizer == pytest.approx(4 * matrices, rel=1e-3)
    shapes = [sorted(op.matrix[:2]) for op in operations(job()) if op.matrix]
    assert muon.muon(1)[1] == 2 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in shapes)


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
