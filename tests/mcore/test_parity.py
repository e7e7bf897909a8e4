"""Test every schedule against plain Megatron: the loss and all gradients of every step, in fp32.

The schedules run with vocabulary passes (vocab-1, vocab-2) and with Megatron's own vocabulary layers (none). The
reference is plain Megatron in one process, with the same weights, data and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES
from tests.harness.training import Run, comparable_model, train
from tests.mcore.case_parts import way_options
from tests.mcore.comparison import assert_as_close, assert_equal

STEPS = 5
MICRO_BATCH = 2
BOUND = 1e-6

# Below, at and above p.
MICROBATCHES = {2: (1, 2, 5), 3: (1, 3, 4), 4: (3, 4, 6)}
LAYERS = {2: 4, 3: 6, 4: 8, 8: 8}  # of 16 chunks on 8 ranks every other one is empty
METHODS = {
    name: ["vocab-1"] if family.own_method else list(map(str, family.methods)) for name, family in FAMILIES.items()
}
METHODS[DEFAULT_SCHEDULE].remove("none")  # Megatron's own schedule
EXTREMES = [
    ("v-half", 4, "none", 16, False, "learned_absolute", True),
    ("1f1b", 8, "vocab-2", 9, True, "learned_absolute", False),
    ("v-min", 8, "vocab-1", 3, False, "rope", False),
    ("dualpipe-v", 8, "vocab-2", 8, False, "learned_absolute", True),
]


def _cases() -> Iterator[tuple[object, ...]]:
    """Every schedule at p = 2, 3 and 4 and with each of its methods: those, m, positions and the like take turns.

    The first of the three runs by default, where each p has one m, so that references are shared.
    """
    for turn, (schedule, methods) in enumerate(METHODS.items()):
        for step in range(3):
            size, place = 2 + (turn + step) % 3, (turn + 1 + 2 * step) % 3
            method = methods[(-1 - turn + step) % len(methods)]
            tied = place == 1 and not (method == "none" and not FAMILIES[schedule].ends_on_last_rank)
            positions = ("rope", "learned_absolute", "learned_absolute")[place]
            case = (schedule, size, method, MICROBATCHES[size][place], tied, positions, place == 2)
            yield pytest.param(*case, marks=pytest.mark.slow) if step else case
    for case in EXTREMES:
        yield pytest.param(*case, marks=pytest.mark.slow)


def _arguments(layers: int, microbatches: int, tied: bool, positions: str, **changes: object) -> list[str]:
    return comparable_model(
        **changes,
        num_layers=layers,  # few: see `comparable_model` of drift, which is 1e-6 at 12 layers
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * microbatches,
        train_iters=STEPS,
        untie_embeddings_and_output_weights=not tied,
        position_embedding_type=positions,
    )


def _schedule(schedule: str, size: int, method: str) -> dict[str, object]:
    """Arguments of a run under one of our schedules."""
    return {
        **way_options(f"{schedule}/{method}", size),
        "num_virtual_stages_per_pipeline_rank": 2 if FAMILIES[schedule].chunks is None else None,
        "activation_limit": f"{size / 2 + 2:g}" if FAMILIES[schedule].bases else None,
    }


@cache
def _plain(layers: int, microbatches: int, tied: bool, positions: str, masked: bool) -> Run:
    return train(1, _arguments(layers, microbatches, tied, positions), masked=masked)


@pytest.mark.parametrize(("schedule", "size", "method", "microbatches", "tied", "positions", "masked"), list(_cases()))
def test_parity(schedule, size, method, microbatches, tied, positions, masked):
    data = LAYERS[size], microbatches, tied, positions
    ours = train(size, _arguments(*data, **_schedule(schedule, size, method)), masked=masked)
    assert len(ours.steps) == STEPS and len(ours.steps[0].microbatches) == microbatches
    assert_equal(ours, _plain(*data, masked), BOUND)


@pytest.mark.parametrize(
    ("precision", "schedule", "method"),
    [
        ("bf16", "1f1b", "vocab-2"),
        pytest.param("bf16", "v-half", "none", marks=pytest.mark.slow),
        pytest.param("fp16", "v-half", "vocab-2", marks=pytest.mark.slow),
    ],
)
def test_half_precision_is_as_close_to_fp32_as_plain_megatron(precision, schedule, method):
    options = {precision: True, **({"loss_scale": 1} if precision == "fp16" else {})}
    size, data = 3, (3, 4, False, "rope")
    exact = _plain(*data, False)
    plain = train(1, _arguments(*data, **options))
    ours = train(size, _arguments(*data, **_schedule(schedule, size, method), **options))
    assert_as_close(ours, plain, exact)
