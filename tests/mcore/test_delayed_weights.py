"""B and W apart through Transformer Engine's delayed weight gradients: its own layers on the CPU, in fp32."""

from __future__ import annotations

import argparse
from functools import cache
from unittest import mock

import pytest
import torch

from megatron_vp.errors import UserError
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, tiny_model
from tests.mcore.comparison import assert_equal
from tests.mcore.engine import Products, engine_case, require

BOUND = 1e-6
NEWEST, BETWEEN, MINIMUM = "2.20.2", "2.14.1", "2.8.0"


def test_transformer_engine_has_what_pass_w_relies_on():
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    options = {"bias": True, "params_dtype": torch.bfloat16, "delay_wgrad_compute": True, "device": "cuda"}
    for kind in (te.Linear, te.LayerNormLinear):
        layer = kind(32, 32, **options)
        assert layer.wgrad_store.delay_wgrad_compute() and layer.wgrad_store.context.empty()
        assert not layer.fuse_wgrad_accumulation and layer.use_bias
        assert layer.weight.skip_backward_post_hook and layer.bias.skip_backward_post_hook
        layer(torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)).sum().backward()
        operands, product = layer.wgrad_store.context.get()
        weight_gradient, bias_gradient = product(*operands)
        assert weight_gradient.shape == layer.weight.shape and bias_gradient.shape == layer.bias.shape
        assert layer.weight.grad is None


@pytest.mark.parametrize(
    ("changes", "version", "words"),
    [
        ({}, "2.7.0", ["Transformer Engine 2.8", "2.7.0", "--transformer-impl local"]),
        ({"tp_comm_overlap": True}, "2.8.0", ["--tp-comm-overlap", "leave"]),
        ({"use_transformer_engine_op_fuser": True}, "2.8.0", ["--use-transformer-engine-op-fuser", "leave"]),
        ({"num_experts": 4}, "2.8.0", ["--num-experts", "--transformer-impl local"]),
        ({"transformer_impl": "inference_optimized"}, "2.8.0", ["inference_optimized", "use"]),
    ],
)
def test_what_its_layers_cannot_delay_is_refused(changes, version, words):
    from megatron.core import utils
    from packaging.version import Version

    from megatron_vp.mcore import refusals

    absent = {"vocab_parallel": False, "tp_comm_overlap": False, "use_transformer_engine_op_fuser": False}
    options = {"pipeline_schedule": "zb-h1", "transformer_impl": "transformer_engine", "num_experts": None}
    args = argparse.Namespace(**absent | options | changes)
    about_split = [each for each in refusals.REFUSALS if "weight gradients" in each.message]
    with (
        mock.patch.object(utils, "_te_version", Version(version)),
        mock.patch.object(refusals, "REFUSALS", about_split),
        pytest.raises(UserError) as refused,
    ):
        refusals.refuse(args)
    assert all(word in str(refused.value) for word in words)


@cache
def _trained(version: str, world_size: int, fused: bool, **changes: object) -> tuple[Run, list[Products]]:
    arguments = tiny_model(
        hidden_size=64,
        lr=1e-5,
        seq_length=64,
        max_position_embeddings=64,
        vocab_size=63,
        eval_iters=1,
        eval_interval=2,
        transformer_impl="transformer_engine",
        attention_backend="unfused",
        **changes,
    )
    ranks = run_ranks(world_size, engine_case, require(version), arguments, fused, timeout=240)
    return _merge([run for run, _ in ranks]), [products for _, products in ranks]


SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 10000,
}
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}
SEQUENCE_PARALLEL = {**TENSOR_PARALLEL, "sequence_parallel": True}
LLAMA = {
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FUSED, APART = True, False
WEIGHTS = 4 * 4 * 4 * 3
"""Products of a run: four a layer, in four layers, of four microbatches a step, in three steps."""

# (schedule, method, fused, version, what else is asked for)
CASES = [
    ("zb-h1", "vocab-2", FUSED, NEWEST, {}),
    ("v-half", "vocab-1", APART, NEWEST, {}),
]
SLOW_CASES = [
    ("zb-h1", None, APART, NEWEST, {}),
    ("v-half", None, FUSED, NEWEST, {}),
    ("zb-v", None, FUSED, NEWEST, LLAMA),
    ("zb-h1", "vocab-2", APART, NEWEST, LLAMA),
    ("zb-h1", "vocab-2", FUSED, NEWEST, RECOMPUTED),
    ("v-half", "vocab-1", FUSED, NEWEST, {"recompute_granularity": "selective"}),
    ("zb-h1", "vocab-2", APART, NEWEST, TENSOR_PARALLEL),
    ("zb-h1", "vocab-2", FUSED, NEWEST, SEQUENCE_PARALLEL),
    ("v-min", "vocab-2", FUSED, NEWEST, SHARDED),
    ("zb-h1", "vocab-2", APART, NEWEST, {**SHARDED, "use_cpu_initialization": True}),
    ("zb-h1", "vocab-2", FUSED, MINIMUM, {}),
    ("v-half", "vocab-1", APART, MINIMUM, SHARDED),
    ("zb-h1", "vocab-2", APART, BETWEEN, SEQUENCE_PARALLEL),
    ("v-half", "vocab-1", FUSED, BETWEEN, LLAMA),
]


@pytest.mark.parametrize(
    ("schedule", "method", "fused", "version", "model"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_every_step_equals_a_whole_backward_of_the_same_layers(schedule, method, fused, version, model):
    on_a_stage = 2 if model.keys() & {*SHARDED, *TENSOR_PARALLEL} else 1
    plain, in_b = _trained(version, on_a_stage, fused, **model)
    ours, in_w = _trained(
        version,
        2 * on_a_stage,
        fused,
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        vocab_parallel=method is not None,
        vocab_parallel_algorithm=method,
        **model,
    )
    assert_equal(ours, plain, BOUND)
    expected = WEIGHTS * model.get("tensor_model_parallel_size", 1)
    assert sum(each.elsewhere for each in in_b) == expected and not any(each.queued for each in in_b)
    assert sum(each.in_w for each in in_w) == sum(each.queued for each in in_w) == expected
    assert not any(each.elsewhere for each in in_w)
    assert sum(each.fused for each in in_w) == (expected if fused else 0)
    if model.keys().isdisjoint(SHARDED):  # whose replicas have two microbatches each
        assert max(each.waiting for each in in_w) > 2 * 4, "on no rank did a W come after a later microbatch's B"
