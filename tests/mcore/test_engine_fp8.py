"""Test transformer layers in fp8 with Transformer Engine's own Python code: its state under our order of passes, and
evaluations between iterations.

Scales, histories, cached weights and queues are Transformer Engine's own, unmodified; `engine_fp8` implements rounding.
The test therefore shows that another order of passes leaves the same state as plain Megatron. It shows nothing about
the kernels.

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

CURRENT = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
LONG_HISTORY = {**DELAYED, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
WEIGHTS = {"bf16": True, "fp8_param_gather": True, "use_distributed_optimizer": True}
ENDS_IN_16_BITS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
TWO_CHUNKS = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
INTERLEAVED = {**TWO_CHUNKS, "pipeline_schedule": "interleaved"}

CASES = [
    ("v-half", APART, MEGATRON, CURRENT),
    ("zb-h1", FUSED, NEWEST, CURRENT),
    ("1f1b", FUSED, NEWEST, CURRENT),
    ("interleaved", FUSED, NEWEST, CURRENT),
    ("v-half", FUSED, NEWEST, CURRENT),
    ("v-min", FUSED, NEWEST, CURRENT),
    ("zb-v", APART, NEWEST, CURRENT),
    ("zb-h1", APART, NEWEST, {**CURRENT, "bf16": True}),
    ("interleaved", FUSED, NEWEST, {**CURRENT, "bf16": True}),
    ("v-half", FUSED, NEWEST, {**CURRENT, **ENDS_IN_16_BITS}),
    ("zb-h1", FUSED, NEWEST, {**CURRENT, **RECOMPUTED}),
    ("zb-h1", FUSED, NEWEST, {**CURRENT, **LLAMA}),
    ("v-half", FUSED, NEWEST, {**CURRENT, **ONE_CALL}),
    ("zb-h1", APART, NEWEST, {**CURRENT, **ONE_CALL}),
    ("zb-h1", FUSED, MEGATRON, CURRENT),
    ("v-half", FUSED, LTS, CURRENT),
    ("zb-h1", APART, MINIMUM, CURRENT),
    ("zb-h1", FUSED, NEWEST, DELAYED),
    ("zb-h1", APART, MEGATRON, DELAYED),
    ("zb-h1", FUSED, LTS, LONG_HISTORY),
    ("zb-h1", FUSED, MINIMUM, DELAYED),
    ("1f1b", FUSED, NEWEST, DELAYED),
    ("v-half", APART, NEWEST, {**CURRENT, **WEIGHTS}),
    ("interleaved", FUSED, NEWEST, {**CURRENT, **WEIGHTS}),
    ("zb-h1", APART, NEWEST, {**DELAYED, **WEIGHTS}),
    ("zb-h1", APART, MEGATRON, {**CURRENT, **WEIGHTS}),
    # Gradients of experts, which are products into memory of our own.
    ("zb-h1", APART, NEWEST, {**CURRENT, **WEIGHTS, **ONE_CALL}),
]


def _schedule(name: str, method: str | None) -> dict[str, object]:
    chunks = {"num_virtual_stages_per_pipeline_rank": 2} if name == "interleaved" else {}
    return {**pipeline(name, method), **chunks}


def assert_same_bits(found: Run, expected: Run) -> None:
    """Equal losses and evaluations; gradient norms within the order of their sums."""
    assert found.losses == expected.losses and None not in found.losses
    assert found.evaluations == expected.evaluations and len(found.evaluations) > 1
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=BOUND)


def assert_masters_start_as_plain_megatrons(schedule: str, model: dict[str, object]) -> None:
    """From Megatron's own draws: the first step sees only rounded weights, the second and third the master weights."""
    plain, _ = trained(NEWEST, 2, APART, same_weights=False, pipeline_model_parallel_size=2, **model)
    ours, products = trained(NEWEST, 2, APART, same_weights=False, **_schedule(schedule, None), **model)
    assert ours.losses == plain.losses and len(plain.losses) == 3 and None not in plain.losses
    assert ours.evaluations == plain.evaluations
    assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=BOUND)
    assert all(each.quantised for each in products)


def assert_replicas_overlap(model: dict[str, object]) -> Run:
    """Two replicas that reduce and gather while they compute; returns our run."""
    plain, _ = trained(NEWEST, 2, FUSED, **{**model, **SHARDED})
    ours, _ = trained(NEWEST, 4, FUSED, **_schedule("interleaved", None), **{**model, **SHARDED})
    assert_same_bits(ours, plain)
    return ours


def assert_plain_megatrons_bits(schedule: str, fused: bool, version: str, model: dict[str, object]) -> None:
    """Two ranks without vocabulary passes, next to plain Megatron on one."""
    plain, _ = trained(version, 1, fused, **model)
    ours, products = trained(version, 2, fused, **_schedule(schedule, None), **model)
    assert_same_bits(ours, plain)
    assert any(each.quantised for each in products)


def assert_as_close_as_two_roundings(
    schedule: str, method: str, fused: bool, exact: Run, model: dict[str, object]
) -> tuple[Run, Run]:
    """Two ranks with vocabulary passes and plain Megatron, both returned, next to `exact`, which is not rounded."""
    plain, _ = trained(NEWEST, 1, fused, **model)
    ours, _ = trained(NEWEST, 2, fused, **_schedule(schedule, method), **model)
    apart = math.sqrt(2)
    rounding = max(abs(a - b) for a, b in zip(plain.losses, exact.losses, strict=True))
    assert rounding > 0 and ours.losses == pytest.approx(plain.losses, abs=apart * rounding)
    assert 0 < largest_distance(ours, plain) <= apart * largest_distance(plain, exact)
    return ours, plain


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "fused", "version", "model"), CASES)
def test_without_vocabulary_passes_every_bit_is_plain_megatrons(schedule, fused, version, model):
    assert_plain_megatrons_bits(schedule, fused, version, model)


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        ("v-half", {**CURRENT, **WEIGHTS}),
        pytest.param("zb-v", {**CURRENT, **WEIGHTS, **ONE_CALL}, marks=pytest.mark.slow),
        # Evaluations change the scales of two chunks and of one differently, see below.
        pytest.param("v-half", {**DELAYED, **WEIGHTS, "eval_iters": 0}, marks=pytest.mark.slow),
    ],
)
def test_master_weights_start_from_what_plain_megatron_drew(schedule, model):
    """Layers move in a V, and so do the values before their rounding."""
    assert_masters_start_as_plain_megatrons(schedule, model)


@pytest.mark.slow
def test_weights_in_fp8_are_gathered_beside_those_in_16_bits():
    """Two replicas, everything overlapped: the buffers of a chunk are of two dtypes."""
    ours = assert_replicas_overlap({**CURRENT, **WEIGHTS})
    assert all(abs(weight).max() < 10 for weight in ours.parameters.values()), "16-bit weights became bytes"


@pytest.mark.slow
def test_a_checkpoint_of_weights_in_fp8_moves_to_plain_megatron_and_back(tmp_path):
    assert_checkpoint_moves(tmp_path, "zb-h1", None, True, APART, **CURRENT, **WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "method"), [("1f1b", "vocab-2"), ("v-half", "vocab-1")])
def test_a_checkpoint_of_weights_in_fp8_goes_on_with_vocabulary_passes(tmp_path, schedule, method):
    """From two ranks to two, and from plain Megatron: bits of the unmoved run, and as close as two roundings."""
    common = {**CURRENT, **WEIGHTS, "eval_iters": 0, "train_iters": 4, "dist_ckpt_optim_fully_reshardable": True}
    split, until = _schedule(schedule, method), {"save_interval": 2, "exit_interval": 2}
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "model"), [("interleaved", DELAYED), ("v-half", DELAYED), ("interleaved", LONG_HISTORY)]
)
def test_delayed_scaling_with_two_chunks_is_that_of_megatrons_own_interleaved_schedule(schedule, model):
    """An evaluation leaves its magnitudes in both chunks, and the first forward of one updates the other's scales.

    So two chunks differ from one, in Megatron's own schedule in the same way. With a history the scales also depend on
    the order of the chunks' forwards, which only `interleaved` shares with Megatron.
    """
    reference, _ = trained(NEWEST, 2, FUSED, **TWO_CHUNKS, **model)
    ours, _ = trained(NEWEST, 2, FUSED, **_schedule(schedule, None), **model)
    assert_same_bits(ours, reference)


@pytest.mark.parametrize(
    ("schedule", "method", "model"),
    [
        ("zb-h1", "vocab-2", CURRENT),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("1f1b", "vocab-2", CURRENT),
                ("v-half", "vocab-1", CURRENT),
                ("interleaved", "vocab-2", CURRENT),
                ("interlaced", "vocab-2", CURRENT),
                ("zb-h1", "vocab-2", DELAYED),
                ("v-half", "vocab-2", {**CURRENT, "bf16": True}),
                ("1f1b", "vocab-2", {**CURRENT, **WEIGHTS}),
                ("v-half", "vocab-2", {**CURRENT, **WEIGHTS}),
                ("interleaved", "vocab-1", {**CURRENT, **WEIGHTS}),
            ]
        ),
    ],
)
def test_with_vocabulary_passes_runs_are_as_close_as_two_roundings(schedule, method, model):
    exact, _ = trained(NEWEST, 1, FUSED)
    ours, plain = assert_as_close_as_two_roundings(schedule, method, FUSED, exact, model)
    # The first forward of the trunk has the same bits, whatever the vocabulary passes round.
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=BOUND if "bf16" not in model else 2**-8)


@pytest.mark.slow
def test_sequence_parallelism_in_fp8_is_plain_megatrons():
    model = {**CURRENT, **SEQUENCE_PARALLEL}
    plain, _ = trained(NEWEST, 2, FUSED, **model)
    ours, _ = trained(NEWEST, 4, FUSED, **_schedule("v-half", None), **model)
    assert_same_bits(ours, plain)
