"""B and W apart through Transformer Engine's delayed weight gradients: against a double of its layers, in fp32."""

from __future__ import annotations

import argparse
from functools import cache
from unittest import mock

import pytest
import torch

from megatron_vp.errors import UserError
from tests.harness.ranks import run_ranks
from tests.harness.training import Run, _merge, tiny_model, train_case
from tests.mcore import engine_double
from tests.mcore.comparison import assert_equal

BOUND = 1e-6


def _layer(fused: bool, delays: bool) -> engine_double.Linear:
    layer = engine_double.Linear(
        6,
        4,
        init_method=lambda weight: torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(3)),
        bias=True,
        return_bias=False,
        params_dtype=torch.float64,
        fuse_wgrad_accumulation=fused,
        delay_wgrad_compute=delays,
    )
    for parameter in layer.parameters():
        # Whatever the step before has left: the fused product of the first microbatch overwrites it.
        parameter.main_grad = (
            torch.full_like(parameter, 7.0) if fused and parameter.dim() > 1 else torch.zeros_like(parameter)
        )
        parameter.grad_added_to_main_grad = False
    return layer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("returned", [False, True], ids=["bias added inside", "bias added outside"])
def test_any_number_of_microbatches_may_lie_between_b_and_w(fused, returned):
    from megatron_vp.mcore.delayed_weights import delaying_layers, take_delayed

    layer, plain = _layer(fused, delays=True), _layer(False, delays=False)
    layer.apply_bias = not returned
    chunk = torch.nn.Sequential(layer)
    inputs = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pending = []
    for number, layer_input in enumerate(inputs):
        output = chunk[0](layer_input.requires_grad_(), is_first_microbatch=number == 0)
        output = output[0] + output[1] if returned else output
        output.square().sum().backward()
        plain(layer_input.detach()).square().sum().backward()
        pending.append(take_delayed(delaying_layers(chunk)))
        assert all(parameter.grad is None for parameter in layer.parameters())
    for gradients in pending:
        assert [each.parameters for each in gradients] == [(layer.weight, layer.bias)]
        for each in gradients:
            each.accumulate()
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad)
    torch.testing.assert_close(layer.bias.main_grad, plain.bias.grad)


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


def engine_case(rank: int, world_size: int, arguments: list[str], fused: bool) -> Run | None:
    """`train_case` in a process whose Megatron finds the double."""
    engine_double.fuses_accumulation = fused
    engine_double.install()
    with engine_double.forgotten("megatron", "megatron_vp", "pretrain_gpt_vp"):
        from megatron_vp.mcore import platform

        own_layers = tuple(choice for choice in platform._CPU_CHOICES if choice[0] != "--transformer-impl")
        with mock.patch.object(platform, "_CPU_CHOICES", own_layers):
            return train_case(rank, world_size, arguments)


@cache
def _trained(world_size: int, fused: bool, **changes: object) -> Run:
    arguments = tiny_model(
        hidden_size=64,
        lr=1e-5,
        seq_length=64,
        max_position_embeddings=64,
        vocab_size=63,
        eval_iters=1,
        eval_interval=2,
        transformer_impl="transformer_engine",
        **changes,
    )
    return _merge(run_ranks(world_size, engine_case, arguments, fused, timeout=240))


OVERLAPPED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 10000,
}
LLAMA = {"normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "rope"}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize(
    ("schedule", "method", "ranks", "model"),
    [
        ("zb-h1", None, 2, {}),
        ("zb-h1", "vocab-2", 2, LLAMA),
        ("v-half", "vocab-1", 2, {}),
        ("zb-v", None, 2, {}),
        ("v-min", "vocab-2", 4, OVERLAPPED),
        ("zb-h1", "vocab-2", 4, {**OVERLAPPED, "use_cpu_initialization": True}),
    ],
)
def test_every_step_equals_one_process_whose_backward_is_whole(schedule, method, ranks, model, fused):
    ours = _trained(
        ranks,
        fused,
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        vocab_parallel=method is not None,
        vocab_parallel_algorithm=method,
        **model,
    )
    assert_equal(ours, _trained(ranks // 2, fused, **model), BOUND)
