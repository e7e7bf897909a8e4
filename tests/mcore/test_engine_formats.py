"""Test transformer layers in fp8 and fp4 with Transformer Engine's own Python code: its state under our order of
passes, and evaluations between iterations.

Scales, histories, cached weights and queues are Transformer Engine's own, unmodified; `engine_fp8`, `engine_blocks` and
`engine_fp4` implement rounding. The test therefore shows that another order of passes leaves the same state as plain
Megatron. It shows nothing about the kernels. `engine_fp4` rounds gradients to the nearest number. A device rounds them
with random numbers, drawn in the order of the passes, so losses differ between schedules there, as with dropout.

Bounds: without vocabulary passes, every product has the same operands as in plain Megatron. Losses and evaluations are
therefore equal in every bit, and gradient norms up to the order of their sums. With vocabulary passes, S and T round
differently in the last bits. Such a small difference moves some values to a neighbouring number of the format, and
after a few layers the two runs round independently. Two independent roundings differ from each other by the square root
of 2 times the distance of one of them from the unrounded run. This is the bound; plain Megatron with and without fp8
measures the distance.
"""

from __future__ import annotations

import math

import pytest

from tests.harness.training import Run
from tests.mcore.comparison import largest_distance
from tests.mcore.engine import (
    APART,
    BOUND,
    FUSED,
    LLAMA,
    LTS,
    MEGATRON,
    MINIMUM,
    NEWEST,
    ONE_CALL,
    RECOMPUTED,
    SEQUENCE_PARALLEL,
    SHARDED,
    assert_checkpoint_moves,
    pipeline,
    trained,
)

slow = pytest.mark.slow
CURRENT = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
LONG_HISTORY = {**DELAYED, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
IN_16_BITS = {"bf16": True, "use_distributed_optimizer": True}
ENDS_IN_16_BITS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
BLOCKWISE = {**IN_16_BITS, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {**IN_16_BITS, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}
FP4 = {"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "bf16": True}
GATHERED = {**IN_16_BITS, "fp8_param_gather": True}
CURRENT_WEIGHTS, DELAYED_WEIGHTS = {**CURRENT, **GATHERED}, {**DELAYED, **GATHERED}
BLOCKWISE_WEIGHTS = {**BLOCKWISE, **GATHERED}
MX_WEIGHTS = {**MXFP8, **SHARDED, **GATHERED, "reuse_grad_buf_for_mxfp8_param_ag": True}
FP4_WEIGHTS = {**FP4, **IN_16_BITS, "fp4_param_gather": True}
TWO_CHUNKS = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}

CASES = [
    ("v-min", FUSED, NEWEST, {**CURRENT, **LLAMA}),
    ("zb-v", APART, MEGATRON, CURRENT),
    ("zb-h1", APART, MINIMUM, CURRENT),
    ("zb-h1", FUSED, LTS, LONG_HISTORY),
    ("interleaved", FUSED, NEWEST, CURRENT_WEIGHTS),
    ("zb-h1", APART, NEWEST, DELAYED_WEIGHTS),
    ("zb-h1", APART, NEWEST, MXFP8),
    # Gradients of experts, which are products into memory of our own.
    ("zb-h1", APART, NEWEST, {**BLOCKWISE_WEIGHTS, **ONE_CALL}),
    ("v-half", APART, NEWEST, MX_WEIGHTS),
    ("interleaved", FUSED, NEWEST, {**FP4, **LLAMA}),
    ("1f1b", APART, NEWEST, {**FP4, **RECOMPUTED}),
    ("v-half", APART, NEWEST, {**FP4, **ENDS_IN_16_BITS}),
    ("zb-h1", APART, NEWEST, {**FP4_WEIGHTS, **ONE_CALL}),
]


def assert_same_bits(found: Run, expected: Run) -> None:
    """Equal losses and evaluations; gradient norms within the order of their sums."""
    assert found.losses == expected.losses and None not in found.losses
    assert found.evaluations == expected.evaluations
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=BOUND)


@slow
@pytest.mark.parametrize(("schedule", "fused", "version", "model"), CASES)
def test_without_vocabulary_passes_every_bit_is_plain_megatrons(schedule, fused, version, model):
    plain, _ = trained(version, 1, fused, **model)
    ours, products = trained(version, 2, fused, **pipeline(schedule, None), **model)
    assert_same_bits(ours, plain)
    assert any(each.quantised for each in products) and len(ours.evaluations) > 1


@slow
@pytest.mark.parametrize("model", [BLOCKWISE_WEIGHTS, FP4_WEIGHTS])
def test_narrow_weights_are_gathered_beside_those_in_16_bits_while_replicas_compute(model):
    """The buffers of a chunk are of two dtypes. Masters of a replica are parts of weights, which may share a block."""
    plain, _ = trained(NEWEST, 2, FUSED, **{**model, **SHARDED})
    ours, _ = trained(NEWEST, 4, FUSED, **pipeline("interleaved", None), **{**model, **SHARDED})
    assert_same_bits(ours, plain)
    assert all(abs(weight).max() < 10 for weight in ours.parameters.values()), "16-bit weights became bytes"


@slow
@pytest.mark.parametrize("model", [MX_WEIGHTS, FP4_WEIGHTS])
def test_a_checkpoint_moves_to_plain_megatron_and_back(tmp_path, model):
    assert_checkpoint_moves(tmp_path, "zb-h1", None, True, APART, **model)


@slow
def test_a_checkpoint_of_weights_in_fp8_goes_on_with_vocabulary_passes(tmp_path):
    """From two ranks to two, and from plain Megatron: bits of the unmoved run, and as close as two roundings."""
    common = {**CURRENT_WEIGHTS, "eval_iters": 0, "train_iters": 4, "dist_ckpt_optim_fully_reshardable": True}
    split, until = pipeline("v-half", "vocab-1"), {"save_interval": 2, "exit_interval": 2}
    unmoved, _ = trained(NEWEST, 2, APART, **common, **split)
    trained(NEWEST, 2, APART, **common, **split, **until, save=tmp_path / "ours")
    resumed, _ = trained(NEWEST, 2, APART, **common, **split, same_weights=False, load=tmp_path / "ours")
    assert resumed.losses == unmoved.losses[2:] and len(resumed.losses) == 2
    plain, _ = trained(NEWEST, 1, APART, **common)
    trained(NEWEST, 1, APART, **common, **until, save=tmp_path / "plain")
    moved, _ = trained(NEWEST, 2, APART, **common, **split, same_weights=False, load=tmp_path / "plain")
    exact, _ = trained(NEWEST, 1, APART, **{**common, "fp8_format": None, "fp8_recipe": None, "fp8_param_gather": None})
    rounding = max(abs(a - b) for a, b in zip(plain.losses, exact.losses, strict=True))
    assert moved.losses == pytest.approx(plain.losses[2:], abs=math.sqrt(2) * rounding) and rounding > 0


@slow
@pytest.mark.parametrize(("schedule", "model"), [("v-half", DELAYED), ("interleaved", LONG_HISTORY)])
def test_delayed_scaling_with_two_chunks_is_that_of_megatrons_own_interleaved_schedule(schedule, model):
    """An evaluation leaves its magnitudes in both chunks, and the first forward of one updates the other's scales.

    So two chunks differ from one, in Megatron's own schedule in the same way. With a history the scales also depend on
    the order of the chunks' forwards, which only `interleaved` shares with Megatron.
    """
    reference, _ = trained(NEWEST, 2, FUSED, **TWO_CHUNKS, **model)
    ours, _ = trained(NEWEST, 2, FUSED, **pipeline(schedule, None), **model)
    assert_same_bits(ours, reference)


@slow
@pytest.mark.parametrize(
    ("schedule", "method", "model"),
    [
        ("v-half", "vocab-1", DELAYED),
        ("zb-h1", "vocab-2", CURRENT_WEIGHTS),
        ("v-half", "vocab-2", BLOCKWISE_WEIGHTS),
        ("interleaved", "vocab-1", MX_WEIGHTS),
        ("v-half", "vocab-2", FP4_WEIGHTS),
    ],
)
def test_with_vocabulary_passes_runs_are_as_close_as_two_roundings(schedule, method, model):
    fused = FUSED if model in (CURRENT, DELAYED, CURRENT_WEIGHTS) else APART
    half = {name: value for name, value in model.items() if fused is APART and name in IN_16_BITS}
    exact, _ = trained(NEWEST, 1, fused, **half)
    plain, _ = trained(NEWEST, 1, fused, **model)
    ours, _ = trained(NEWEST, 2, fused, **pipeline(schedule, method), **model)
    apart = math.sqrt(2)
    rounding = max(abs(a - b) for a, b in zip(plain.losses, exact.losses, strict=True))
    assert rounding > 0 and ours.losses == pytest.approx(plain.losses, abs=apart * rounding)
    assert 0 < largest_distance(ours, plain) <= apart * largest_distance(plain, exact)
    if fused is FUSED:  # the first forward of the trunk has the same bits, whatever the vocabulary passes round
        assert ours.losses[0] == pytest.approx(plain.losses[0], rel=BOUND if "bf16" not in model else 2**-8)


@slow
@pytest.mark.parametrize("model", [CURRENT, FP4_WEIGHTS])
def test_sequence_parallelism_is_plain_megatrons(model):
    plain, _ = trained(NEWEST, 2, APART, **model, **SEQUENCE_PARALLEL)
    ours, _ = trained(NEWEST, 4, APART, **pipeline("v-half", None), **model, **SEQUENCE_PARALLEL)
    assert_same_bits(ours, plain)
