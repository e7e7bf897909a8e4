"""Count the memory that Transformer Engine's layers hold from B to W, in a replay on fake tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from megatron_vp.jobs.layer_kind import LayerKind
from tests.harness.ranks import ROOT, run_ranks
from tests.harness.training import tiny_model
from tests.mcore.engine import APART, FUSED, NEWEST, on_cpu, require

TENSOR_RANKS = 2
IN_PARTS = {
    "num_layers": 8,
    "hidden_size": 64,
    "seq_length": 128,
    "micro_batch_size": 4,
    "global_batch_size": 64,
    "tensor_model_parallel_size": TENSOR_RANKS,
    "sequence_parallel": True,
    "pipeline_schedule": "v-min",
}
"""Many tokens in small layers: activations are most of the memory."""
LAYER_BY_LAYER = {
    "num_layers": 4,
    "hidden_size": 256,
    "seq_length": 32,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "pipeline_schedule": "zb-h1",
}
"""Few tokens in large layers, whose gradients are made apart: W takes more memory for a product than B for anything."""


def peak(_rank: int, _world_size: int, model: dict[str, Any], fused: bool, as_before: bool) -> int:
    """The most bytes on rank 0 of a job; `as_before` keeps inputs whole, and all operands to the end of W."""
    sizes = {**model, "max_position_embeddings": model["seq_length"], "vocab_size": 500}
    common = {"mock_data": None, "tokenizer_type": None, "train_iters": None, "distributed_timeout_minutes": None}
    options = {"transformer_impl": "transformer_engine", "attention_backend": "unfused", "bf16": True, "clip_grad": 0}
    job = tiny_model(**common, **sizes, **options, pipeline_model_parallel_size=2, no_bias_gelu_fusion=True)
    with on_cpu(NEWEST, fused), ExitStack() as changed:
        from megatron.training import training

        from megatron_vp.mcore.model import split_backward
        from megatron_vp.mcore.replay import one_rank
        from megatron_vp.mcore.training import megatron_model

        # A replay without numbers would replace Transformer Engine's layers by local ones.
        changed.enter_context(mock.patch.object(one_rank, "layer_kind", lambda _: LayerKind.LOCAL))
        # With Transformer Engine the norm stays on the device, and Megatron makes a new tensor of its number.
        no_norm = mock.patch.object(training, "reduce_max_stat_across_model_parallel_group", lambda *_, **__: 0.0)
        changed.enter_context(no_norm)
        if as_before:
            changed.enter_context(mock.patch.object(megatron_model, "late_weights", lambda *_: frozenset()))
            held: list[Any] = []
            make = split_backward.backward_without_weights
            in_w = megatron_model.MegatronModel.weight_gradient

            def backward(*args: Any) -> list[Any]:
                pending = make(*args)
                held.append((pending, list(pending)))
                return pending

            def weight_gradient(self: Any, *which: int) -> None:
                in_w(self, *which)
                held[:] = [(pending, kept) for pending, kept in held if pending]

            changed.enter_context(mock.patch.object(megatron_model, "backward_without_weights", backward))
            changed.enter_context(mock.patch.object(megatron_model.MegatronModel, "weight_gradient", weight_gradient))
        config = str(ROOT / "configs" / "quickstart.yaml")
        script = str(ROOT / "pretrain_gpt_vp.py")
        return one_rank.run_alone(script, [config], 0, None, 1, job, shapes_only=True).memory_bytes["peak"]


def _saved(model: dict[str, Any], fused: bool) -> int:
    require(NEWEST)
    (before,), (now,) = (run_ranks(1, peak, model, fused, as_before, timeout=300) for as_before in (True, False))
    return before - now


@pytest.mark.slow
def test_gathered_inputs_are_kept_in_parts_until_a_late_w():
    tokens = IN_PARTS["seq_length"] * IN_PARTS["micro_batch_size"]
    others = tokens * IN_PARTS["hidden_size"] * 2 * (TENSOR_RANKS - 1) // TENSOR_RANKS
    # Of each microbatch at least the two column-parallel products of a chunk's two layers.
    assert _saved(IN_PARTS, FUSED) >= 4 * others


@pytest.mark.slow
def test_w_frees_a_layers_operands_before_the_next_product():
    tokens = LAYER_BY_LAYER["seq_length"] * LAYER_BY_LAYER["micro_batch_size"]
    # Before the largest product comes that of attention's output, with an input and an output gradient of one width.
    assert _saved(LAYER_BY_LAYER, APART) >= 2 * tokens * LAYER_BY_LAYER["hidden_size"] * 2
