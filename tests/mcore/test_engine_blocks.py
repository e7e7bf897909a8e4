"""Test transformer layers in fp8 with a scale per block, weights included: recipes `blockwise` and `mxfp8`.

The formats are implemented in `engine_blocks`. They keep no state between passes. The method and the bounds are those
of `test_engine_fp8`.
"""

from __future__ import annotations

import pytest

from tests.mcore.engine import APART, NEWEST, ONE_CALL, SHARDED, assert_checkpoint_moves, trained
from tests.mcore.test_engine_fp8 import (
    assert_as_close_as_two_roundings,
    assert_masters_start_as_plain_megatrons,
    assert_plain_megatrons_bits,
    assert_replicas_overlap,
)

BF16 = {"bf16": True, "use_distributed_optimizer": True}
BLOCKWISE = {**BF16, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {**BF16, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}
WEIGHTS = {**BLOCKWISE, "fp8_param_gather": True}
MX_WEIGHTS = {**MXFP8, **SHARDED, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}

CASES = [
    ("v-half", BLOCKWISE),
    ("zb-h1", MXFP8),
    ("1f1b", WEIGHTS),
    ("v-half", WEIGHTS),
    ("zb-h1", {**WEIGHTS, **ONE_CALL}),
    ("interleaved", WEIGHTS),
    ("1f1b", MX_WEIGHTS),
    ("interleaved", MX_WEIGHTS),
    ("v-half", MX_WEIGHTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "model"), CASES)
def test_without_vocabulary_passes_every_bit_is_plain_megatrons(schedule, model):
    assert_plain_megatrons_bits(schedule, APART, NEWEST, model)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WEIGHTS, MX_WEIGHTS])
def test_master_weights_start_from_what_plain_megatron_drew(model):
    """Under a V, where layers move."""
    assert_masters_start_as_plain_megatrons("v-half", model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "method", "model"),
    [
        ("1f1b", "vocab-2", WEIGHTS),
        ("v-half", "vocab-2", WEIGHTS),
        ("interleaved", "vocab-1", WEIGHTS),
        ("1f1b", "vocab-2", MX_WEIGHTS),
        ("v-half", "vocab-2", MX_WEIGHTS),
        ("interleaved", "vocab-1", MX_WEIGHTS),
    ],
)
def test_with_vocabulary_passes_runs_are_as_close_as_two_roundings(schedule, method, model):
    exact, _ = trained(NEWEST, 1, APART, **BF16)
    assert_as_close_as_two_roundings(schedule, method, APART, exact, model)


@pytest.mark.slow
def test_two_replicas_gather_weights_while_they_compute():
    """Masters of a replica are parts of weights, which share a block."""
    assert_replicas_overlap(WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WEIGHTS, MX_WEIGHTS])
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, model):
    assert_checkpoint_moves(tmp_path, "zb-h1", None, True, APART, **model)
