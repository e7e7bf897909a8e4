"""Test separate B and W with Transformer Engine's delayed weight gradients: requirements and refusals.

Training with its layers is in test_transformer_engine.py.
"""

from __future__ import annotations

import weakref
from queue import Queue
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.model.delayed_weights import accumulate, take_delayed
from megatron_vp.mcore.training import megatron_model
from megatron_vp.schedule.passes import Pass


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
        ({"use_grouped_gemm_for_shared_expert": True}, "2.14.0", ["--use-grouped-gemm-for-shared-expert", "leave"]),
    ],
)
def test_what_its_layers_cannot_delay_is_refused(changes, version, words):
    from megatron.core import utils
    from packaging.version import Version

    from megatron_vp.mcore.options import refusals

    options = {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-h1",
        "fp8": None,
        "mtp_num_layers": None,
        "virtual_pipeline_model_parallel_size": None,
        "core_attention": "megatron",
        "vocab_parallel": False,
        "offload_chunks": "0",
        "eval_interval": 1,
        **dict.fromkeys(("vocab_label_smoothing", "vocab_z_loss"), 0.0),
        "transformer_impl": "transformer_engine",
    }
    args = Arguments(options | changes)
    with (
        mock.patch.object(utils, "_te_version", Version(version)),
        pytest.raises(UserError) as refused,
    ):
        refusals.refuse(args)
    assert all(word in str(refused.value) for word in words)


def _in_group(weights: list[torch.Tensor], fused: bool, dtype: torch.dtype) -> SimpleNamespace:
    """A layer of grouped experts, as far as pass W looks at it."""
    layer = SimpleNamespace(num_gemms=len(weights), fuse_wgrad_accumulation=fused, use_bias=False)
    layer.activation_dtype = dtype
    for expert, weight in enumerate(weights):
        parameter = torch.nn.Parameter(weight)
        parameter.main_grad = torch.ones(weight.shape)
        setattr(layer, f"weight{expert}", parameter)
    return layer


def test_a_frozen_bias_gets_nothing():
    layer = SimpleNamespace(fuse_wgrad_accumulation=False, use_bias=True)
    layer.weight = torch.nn.Parameter(torch.zeros(2, 3))
    layer.weight.main_grad = torch.ones(2, 3)
    layer.bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    accumulate(layer, [None, None], lambda *_: (torch.ones(2, 3), torch.ones(2)), None)
    assert layer.weight.main_grad.unique().tolist() == [2.0] and not hasattr(layer.bias, "main_grad")


class _Quantised:
    """A quantised operand that says what it keeps."""

    def __init__(self):
        self.kept = {"rowwise", "columnwise"}

    def update_usage(self, rowwise_usage, columnwise_usage):
        self.kept = {
            name for name, kept in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)) if kept and self.kept
        }


def _queue(layer: SimpleNamespace, *operands: object) -> SimpleNamespace:
    layer.wgrad_store = SimpleNamespace(context=Queue())
    layer.wgrad_store.context.put((list(operands), None))
    return layer


def test_what_only_the_input_gradient_needed_of_a_quantised_operand_is_freed():
    alone = SimpleNamespace(sequence_parallel=False, use_bias=False, weight=torch.nn.Parameter(torch.zeros(1)))
    operands = _Quantised(), _Quantised()
    (taken,) = take_delayed([_queue(alone, *operands)], w_is_late=True)
    assert taken.args[1] == list(operands) and all(each.kept == {"columnwise"} for each in operands)
    experts = [_Quantised(), _Quantised()]
    take_delayed([_queue(_in_group([torch.zeros(1)], True, torch.float32), experts, experts, [])], w_is_late=False)
    assert all(each.kept == {"columnwise"} for each in experts)


def _gathering() -> SimpleNamespace:
    """A column-parallel layer under sequence parallelism, of which two tensor ranks hold half of the sequence each."""
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    layer = SimpleNamespace(sequence_parallel=True, parallel_mode="column", tp_group=group, use_bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(1))
    return layer


def test_a_gathered_input_is_kept_in_parts_where_w_is_late():
    whole = torch.arange(8.0).reshape(4, 2)
    (near,) = take_delayed([_queue(_gathering(), whole, whole)], w_is_late=False)
    assert near.args[1][0] is whole and near.args[3] is None
    layer = _gathering()
    (late,) = take_delayed([_queue(layer, whole, whole)], w_is_late=True)
    part, gradient = late.args[1]
    assert part.tolist() == whole[2:].tolist() and late.args[3] is layer.tp_group
    assert part.untyped_storage().nbytes() == whole.untyped_storage().nbytes() / 2
    assert gradient is whole
    layer.parallel_mode = "row"  # whose input is this rank's own
    assert take_delayed([_queue(layer, whole, whole)], w_is_late=True)[0].args[1][0] is whole


def test_w_is_late_where_another_pass_runs_between():
    order = [*("F0", "F1", "B0", "W0", "B1", "S1", "T1", "W1"), *("F2", "B2", "F3", "W2", "B3", "W3")]
    passes = tuple(map(Pass.parse, order))
    schedule = SimpleNamespace(ranks=((), passes))
    assert megatron_model.late_weights(schedule, 1) == {(0, 2)}


class _Freed:
    """Pending gradients that say which of them still hold their operands when one is computed."""

    def __init__(self, alive: weakref.WeakSet, seen: list[int]):
        self._alive, self._seen = alive, seen
        alive.add(self)

    def __call__(self):
        self._seen.append(len(self._alive))


def test_w_frees_what_a_layer_has_used_before_the_next(monkeypatch):
    alive, seen = weakref.WeakSet(), []
    model = megatron_model.MegatronModel.__new__(megatron_model.MegatronModel)
    model._pending_weights = {(0, 0): [_Freed(alive, seen) for _ in range(3)]}
    model.weight_gradient(0, 0)
    assert seen == [3, 2, 1]
