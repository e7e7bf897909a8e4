"""Test Transformer Engine's own layers on CPU, in fp32: the Python code of its wheel, with PyTorch for its kernels."""

from __future__ import annotations

import pytest

from megatron_vp.schedule import FAMILIES
from tests.mcore.case_parts import LATENT
from tests.mcore.comparison import assert_as_close, assert_equal, largest_distance
from tests.mcore.engine import (
    APART,
    BOUND,
    FUSED,
    LLAMA,
    LTS,
    MEGATRON,
    MINIMUM,
    NEWEST,
    RECOMPUTED,
    SEQUENCE_PARALLEL,
    SHARDED,
    TENSOR_PARALLEL,
    assert_checkpoint_moves,
    pipeline,
    trained,
)

LAYERS = 4 * 4 * 3
"""Layers that a run computes: four, of four microbatches per step, in three steps."""
BY_PARTS = {**LATENT, "core_attention": None}


def _products(model: dict[str, object]) -> int:
    """Of a layer: queries, keys and values in one or in four, what leaves attention, and two of the MLP."""
    return 7 if model.get("multi_latent_attention") else 4


# (schedule, method, fused, version, what else is asked for)
CASES = [("zb-h1", "vocab-2", FUSED, NEWEST, {})]
SLOW_CASES = [
    ("v-half", "vocab-1", APART, NEWEST, {}),
    ("1f1b", "vocab-2", FUSED, NEWEST, {}),
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
    ("zb-h1", "vocab-2", APART, LTS, SEQUENCE_PARALLEL),
    ("v-half", "vocab-1", FUSED, LTS, LLAMA),
    ("v-half", "vocab-2", FUSED, MEGATRON, SEQUENCE_PARALLEL),
    ("zb-h1", None, APART, MEGATRON, LLAMA),
    ("v-min", "vocab-1", FUSED, MEGATRON, SHARDED),
    ("v-half", "vocab-2", FUSED, NEWEST, BY_PARTS),
    ("zb-h1", None, APART, NEWEST, BY_PARTS),
    ("zb-h1", "vocab-1", APART, MEGATRON, {**BY_PARTS, **SEQUENCE_PARALLEL}),
]


@pytest.mark.parametrize(
    ("schedule", "method", "fused", "version", "model"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_every_step_equals_plain_megatron_with_the_same_layers(schedule, method, fused, version, model):
    on_a_stage = 2 if model.keys() & {*SHARDED, *TENSOR_PARALLEL} else 1
    plain, in_b = trained(version, on_a_stage, fused, **model)
    ours, found = trained(version, 2 * on_a_stage, fused, **pipeline(schedule, method), **model)
    assert_equal(ours, plain, BOUND)
    products = LAYERS * _products(model) * model.get("tensor_model_parallel_size", 1)
    assert sum(each.elsewhere for each in in_b) == products and not any(each.queued for each in in_b)
    in_w = products if FAMILIES[schedule].splits_backward else 0
    assert sum(each.in_w for each in found) == sum(each.queued for each in found) == in_w
    assert sum(each.elsewhere for each in found) == products - in_w
    assert sum(each.fused for each in found) == (in_w if fused else 0)
    if in_w and model.keys().isdisjoint(SHARDED):  # whose replicas have two microbatches each
        assert max(each.waiting for each in found) > 2 * _products(model), "every W came before a later B"


ONE_ROUNDING = 2.0**-8
"""To bf16, relative."""

IN_16_BITS = [
    ("zb-h1", None, FUSED, MEGATRON, {}),
    ("zb-h1", "vocab-2", FUSED, MEGATRON, {}),
    ("v-half", None, APART, MEGATRON, LLAMA),
    ("v-half", "vocab-1", APART, NEWEST, {}),
    ("1f1b", "vocab-2", FUSED, NEWEST, LLAMA),
    ("zb-h1", None, APART, LTS, {}),
    ("v-half", None, FUSED, MINIMUM, {}),
    ("v-min", None, FUSED, NEWEST, SEQUENCE_PARALLEL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "method", "fused", "version", "model"), IN_16_BITS)
def test_in_16_bits_a_split_backward_rounds_as_plain_megatron(schedule, method, fused, version, model):
    """Without vocabulary passes gradients are one rounding apart at most, and losses as close as in fp32.

    W adds the gradient of a bias that Transformer Engine makes in its GEMM to `main_grad` as it is, where autograd
    rounds it to 16 bits first. Local layers on a CPU round a product before W adds it, where Apex's kernel does not.
    """
    on_a_stage = 2 if model.keys() & TENSOR_PARALLEL.keys() else 1
    plain, _ = trained(version, on_a_stage, fused, bf16=True, **model)
    ours, _ = trained(version, 2 * on_a_stage, fused, bf16=True, **pipeline(schedule, method), **model)
    if method is None:
        assert ours.losses == pytest.approx(plain.losses, rel=BOUND)
        for found, expected in zip(ours.evaluations, plain.evaluations, strict=True):
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=BOUND)
        assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=ONE_ROUNDING)
        assert largest_distance(ours, plain) <= ONE_ROUNDING
    else:
        assert_as_close(ours, plain, trained(version, on_a_stage, fused, **model)[0])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole optimizer", "distributed optimizer"])
@pytest.mark.parametrize(("schedule", "method"), [("1f1b", "vocab-2"), ("zb-h1", "vocab-2"), ("v-half", "vocab-1")])
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, schedule, method, sharded):
    assert_checkpoint_moves(tmp_path, schedule, method, sharded)
