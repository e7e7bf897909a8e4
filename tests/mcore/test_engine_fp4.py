"""Test transformer layers in NVFP4, weights included, with Transformer Engine's own Python code, as `test_engine_fp8`
does.

`engine_fp4` rounds gradients to the nearest number. A device rounds them with random numbers, drawn in the order of the
passes, so losses differ between schedules there, as with dropout. The test shows that nothing else differs.
"""

from __future__ import annotations

import pytest

from tests.mcore.engine import (
    APART,
    FUSED,
    LLAMA,
    MEGATRON,
    NEWEST,
    ONE_CALL,
    RECOMPUTED,
    SEQUENCE_PARALLEL,
    assert_checkpoint_moves,
    trained,
)
from tests.mcore.test_engine_fp8 import (
    ENDS_IN_16_BITS,
    _schedule,
    assert_as_close_as_two_roundings,
    assert_masters_start_as_plain_megatrons,
    assert_plain_megatrons_bits,
    assert_replicas_overlap,
    assert_same_bits,
)

FP4 = {"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "bf16": True}
WEIGHTS = {**FP4, "fp4_param_gather": True, "use_distributed_optimizer": True}

CASES = [
    ("1f1b", FUSED, NEWEST, FP4),
    ("interleaved", FUSED, NEWEST, {**FP4, **LLAMA}),
    ("zb-h1", APART, NEWEST, FP4),
    ("v-half", APART, MEGATRON, FP4),
    ("v-half", APART, NEWEST, {**FP4, **ONE_CALL}),
    ("zb-h1", APART, NEWEST, {**FP4, **RECOMPUTED}),
    ("v-half", APART, NEWEST, {**FP4, **ENDS_IN_16_BITS}),
    ("1f1b", FUSED, NEWEST, WEIGHTS),
    ("interleaved", FUSED, NEWEST, {**WEIGHTS, **ONE_CALL}),
    ("zb-h1", APART, NEWEST, {**WEIGHTS, **ONE_CALL}),
    ("v-half", APART, NEWEST, WEIGHTS),
    ("v-half", APART, MEGATRON, WEIGHTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "fused", "version", "model"), CASES)
def test_without_vocabulary_passes_every_bit_is_plain_megatrons(schedule, fused, version, model):
    assert_plain_megatrons_bits(schedule, fused, version, model)


@pytest.mark.parametrize("model", [WEIGHTS, pytest.param({**WEIGHTS, **ONE_CALL}, marks=pytest.mark.slow)])
def test_master_weights_start_from_what_plain_megatron_drew(model):
    """As in fp8, under a V, where layers move."""
    assert_masters_start_as_plain_megatrons("v-half", model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "method", "model"),
    [("1f1b", "vocab-2", FP4), ("v-half", "vocab-2", WEIGHTS), ("interleaved", "vocab-1", WEIGHTS)],
)
def test_with_vocabulary_passes_runs_are_as_close_as_two_roundings(schedule, method, model):
    exact, _ = trained(NEWEST, 1, APART, bf16=True, use_distributed_optimizer=model is WEIGHTS)
    assert_as_close_as_two_roundings(schedule, method, APART, exact, model)


@pytest.mark.slow
def test_two_replicas_gather_weights_in_fp4_while_they_compute():
    """Masters of a replica are parts of weights, cut where a byte of two numbers may be shared."""
    assert_replicas_overlap(WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", [FP4, WEIGHTS])
def test_sequence_parallelism_is_plain_megatrons(model):
    plain, _ = trained(NEWEST, 2, APART, **model, **SEQUENCE_PARALLEL)
    ours, _ = trained(NEWEST, 4, APART, **_schedule("v-half", None), **model, **SEQUENCE_PARALLEL)
    assert_same_bits(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("model", [FP4, WEIGHTS])
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, model):
    assert_checkpoint_moves(tmp_path, "zb-h1", None, "fp4_param_gather" in model, APART, **model)
