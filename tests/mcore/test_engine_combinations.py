"""Test that every combination of layers, Apex and fusion trains on the CPU, with plain Megatron's gradients."""

from __future__ import annotations

from itertools import product

import pytest

from tests.mcore.comparison import assert_equal
from tests.mcore.engine import APART, BOUND, FUSED, MEGATRON, NEWEST, pipeline, trained

LAYERS = ("transformer_engine", "local")
SCHEDULES = [("1f1b", "vocab-2"), ("v-half", "vocab-1")]
TWO_STEPS = {"train_iters": 2, "eval_interval": 1}

# (layers, Apex is there, fused, version, (schedule, method))
CASES = [("transformer_engine", False, FUSED, MEGATRON, ("v-half", "vocab-1"))]
SLOW_CASES = [
    case for case in product(LAYERS, (True, False), (FUSED, APART), (MEGATRON, NEWEST), SCHEDULES) if case not in CASES
]


@pytest.mark.parametrize(
    ("layers", "apex", "fused", "version", "schedule"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_every_combination_trains_as_plain_megatron(layers, apex, fused, version, schedule):
    model = {"transformer_impl": layers, **TWO_STEPS}
    plain, _ = trained(version, 1, APART, **model)
    ours, products = trained(version, 2, fused, apex=apex, **pipeline(*schedule), **model)
    assert_equal(ours, plain, BOUND)
    assert any(each.queued for each in products) == (layers == LAYERS[0] and schedule[0] == "v-half")


def test_plain_megatron_fuses_accumulation_without_apex():
    """Its own output layer cannot be built there, and all pip-installed Transformer Engines are without Apex."""
    model = {"transformer_impl": "transformer_engine", **TWO_STEPS}
    plain, _ = trained(MEGATRON, 1, APART, **model)
    fused, _ = trained(MEGATRON, 1, FUSED, apex=False, **model)
    assert_equal(fused, plain, BOUND)


@pytest.mark.parametrize(
    ("schedule", "method"),
    [
        ("interleaved", None),
        pytest.param("v-half", "vocab-2", marks=pytest.mark.slow),
        pytest.param("1f1b", "vocab-1", marks=pytest.mark.slow),
        pytest.param("1f1b", "vocab-2", marks=pytest.mark.slow),
        pytest.param("interleaved", "vocab-1", marks=pytest.mark.slow),
        pytest.param("zb-h1", None, marks=pytest.mark.slow),
    ],
)
def test_what_megatron_puts_off_for_its_own_schedule_is_computed_in_ours(schedule, method):
    put_off = {**TWO_STEPS, "defer_embedding_wgrad_compute": True}
    plain, _ = trained(NEWEST, 2, FUSED, pipeline_model_parallel_size=2, **put_off)
    chunks = {"num_virtual_stages_per_pipeline_rank": 2 if schedule == "interleaved" else None}
    ours, _ = trained(NEWEST, 2, FUSED, **pipeline(schedule, method), **chunks, **put_off)
    assert_equal(ours, plain, BOUND)
