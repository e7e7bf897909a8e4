"""Test that the FLOPs of an iteration, from which MFU is computed, are those of Megatron's --log-throughput."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vp.cost.layers.flops import model_flops, paper_flops
from megatron_vp.cost.layers.job_sizes import job_of

ABSENT = """
    moe_latent_size moe_shared_expert_intermediate_size attention_output_gate experimental_attention_variant
    hybrid_layer_pattern num_experts mtp_num_layers moe_ffn_hidden_size multi_latent_attention linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim gdp_num_householder
"""
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 128, "linear_num_key_heads": 8}
DELTA |= {"linear_num_value_heads": 16, "linear_conv_kernel_dim": 4}
MAMBA = {"mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_num_heads": 128}


@st.composite
def jobs(draw):
    """Configurations of GPT and hybrid models, dense and with experts, without padding of the vocabulary."""
    heads = draw(st.sampled_from([8, 16]))
    values = {
        "num_layers": draw(st.sampled_from([4, 12])),
        "hidden_size": 128 * heads,
        "num_attention_heads": heads,
        "kv_channels": draw(st.sampled_from([64, 128])),
        "ffn_hidden_size": draw(st.sampled_from([4096, 5632])),
        "vocab_size": 32768,
        "padded_vocab_size": 32768,
        "seq_length": draw(st.sampled_from([512, 4096])),
        "micro_batch_size": draw(st.sampled_from([1, 2])),
        "global_batch_size": 16,
        "swiglu": draw(st.booleans()),
        "group_query_attention": draw(st.booleans()),
        "tensor_model_parallel_size": draw(st.sampled_from([1, 2])),
        "pipeline_model_parallel_size": 2,
    }
    groups = draw(st.sampled_from([1, 4]))
    values["num_query_groups"] = groups if values["group_query_attention"] else heads
    kind = draw(st.sampled_from(["dense", "experts", "prediction", "hybrid", "latent", "deepseek", "delta"]))
    if kind == "experts":
        values |= {"num_experts": 8, "moe_router_topk": draw(st.sampled_from([1, 2])), "moe_layer_freq": 1}
        values |= {"moe_ffn_hidden_size": 1024}
    if kind == "prediction":
        values |= {"mtp_num_layers": draw(st.sampled_from([1, 2]))}
    if kind in ("latent", "deepseek"):
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": draw(st.sampled_from([None, 384])),
            "kv_lora_rank": 96,
        }
        values |= {"qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 48, "group_query_attention": False}
    if kind == "deepseek":
        dense, layers = draw(st.sampled_from([0, 1, 3])), values["num_layers"]
        values |= {"num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": [0] * dense + [1] * (layers - dense)}
        values |= {"moe_ffn_hidden_size": 1024, "moe_shared_expert_intermediate_size": 2048, "mtp_num_layers": 1}
    if kind == "hybrid":
        values |= {"hybrid_layer_pattern": "*-G-" * (values["num_layers"] // 4), "moe_router_topk": 2} | DELTA
    if kind == "delta":
        values |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4} | DELTA
        values |= {"attention_output_gate": draw(st.booleans())}
    return values


@settings(max_examples=60, deadline=None)
@given(values=jobs())
def test_every_job_counts_as_in_megatron(values):
    training = pytest.importorskip("megatron.training.training")
    arguments = SimpleNamespace(**dict.fromkeys(ABSENT.split()) | MAMBA | values)
    theirs = training.num_floating_point_operations(arguments, values["global_batch_size"])
    job = job_of(values, 2 * values["tensor_model_parallel_size"])
    assert model_flops(job) == pytest.approx(theirs, rel=1e-9)
    assert paper_flops(job) > model_flops(job) or "mtp_num_layers" in values or "kv_lora_rank" in values
