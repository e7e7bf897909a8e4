"""Test which layers have experts, and the cost of latent attention, shared experts and dense layers."""

from __future__ import annotations

import pytest

from megatron_vp.cost.layers.job_sizes import expert_layers, job_of
from megatron_vp.cost.layers.layer_operations import layer_weights
from megatron_vp.cost.layers.layer_types import model_layers, stage_layers
from megatron_vp.errors import UserError
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
    layers = model_layers(job)
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
