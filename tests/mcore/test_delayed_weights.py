"""B and W apart through Transformer Engine's delayed weight gradients: what it needs, and what is refused.

Training with its layers is in test_transformer_engine.py.
"""

from __future__ import annotations

import argparse
from unittest import mock

import pytest
import torch

from megatron_vp.errors import UserError


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
        ({"use_grouped_gemm_for_shared_expert": True}, "2.14.0", ["--use-grouped-gemm-for-shared-expert", "leave"]),
        ({"moe_single_grouped_bias": True}, "2.14.0", ["--moe-single-grouped-bias", "leave"]),
        ({"transformer_impl": "inference_optimized"}, "2.8.0", ["inference_optimized", "use"]),
    ],
)
def test_what_its_layers_cannot_delay_is_refused(changes, version, words):
    from megatron.core import utils
    from packaging.version import Version

    from megatron_vp.mcore.options import refusals

    absent = dict.fromkeys(
        [
            *("vocab_parallel", "tp_comm_overlap", "use_transformer_engine_op_fuser"),
            *("use_grouped_gemm_for_shared_expert", "moe_single_grouped_weight", "moe_single_grouped_bias"),
        ]
    )
    options = {"pipeline_schedule": "zb-h1", "transformer_impl": "transformer_engine"}
    args = argparse.Namespace(**absent | options | changes)
    about_split = [each for each in refusals.REFUSALS if "weight gradients" in each.message]
    with (
        mock.patch.object(utils, "_te_version", Version(version)),
        mock.patch.object(refusals, "REFUSALS", about_split),
        pytest.raises(UserError) as refused,
    ):
        refusals.refuse(args)
    assert all(word in str(refused.value) for word in words)
