"""Vocabulary parallelism against plain Megatron: every step's loss and every parameter's gradient, in fp32.

A case is a line. The reference of a case is plain Megatron in one process: same weights, same data, same optimizer.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.harness.training import Run, tiny_model, train
from tests.mcore.comparison import assert_as_close, assert_equal

STEPS = 5
MICRO_BATCH = 2
BOUND = 1e-6

# p, algorithm, m, tied, positions, loss mask. Every p, algorithm and m in {1, p-1, p, p+1, 4p}; the rest takes turns.
CASES_1F1B = [
    (2, "vocab-1", 1, False, "rope", False),
    (2, "vocab-1", 2, True, "learned_absolute", True),
    (2, "vocab-1", 3, False, "learned_absolute", True),
    (2, "vocab-1", 8, True, "rope", False),
    (2, "vocab-2", 1, True, "learned_absolute", True),
    (2, "vocab-2", 2, False, "rope", False),
    (2, "vocab-2", 3, True, "rope", False),
    (2, "vocab-2", 8, False, "learned_absolute", True),
    (3, "vocab-1", 1, True, "learned_absolute", False),
    (3, "vocab-1", 2, False, "rope", True),
    (3, "vocab-1", 3, True, "rope", True),
    (3, "vocab-1", 4, False, "learned_absolute", False),
    (3, "vocab-1", 12, True, "learned_absolute", True),
    (3, "vocab-2", 1, False, "rope", True),
    (3, "vocab-2", 2, True, "learned_absolute", False),
    (3, "vocab-2", 3, False, "learned_absolute", False),
    (3, "vocab-2", 4, True, "rope", True),
    (3, "vocab-2", 12, False, "rope", False),
    (4, "vocab-1", 1, False, "learned_absolute", True),
    (4, "vocab-1", 3, True, "rope", False),
    (4, "vocab-1", 4, False, "rope", False),
    (4, "vocab-1", 5, True, "learned_absolute", True),
    (4, "vocab-1", 16, False, "rope", True),
    (4, "vocab-2", 1, True, "rope", False),
    (4, "vocab-2", 3, False, "learned_absolute", True),
    (4, "vocab-2", 4, True, "learned_absolute", True),
    (4, "vocab-2", 5, False, "rope", False),
    (4, "vocab-2", 16, True, "rope", False),
]
CASES = [("1f1b", *case) for case in CASES_1F1B] + [
    ("zb-h1", 2, "vocab-1", 1, False, "rope", False),
    ("zb-h1", 2, "vocab-2", 5, True, "learned_absolute", True),
    ("zb-h1", 4, "vocab-1", 6, True, "rope", False),
    ("zb-h1", 4, "vocab-2", 16, False, "learned_absolute", False),
    ("interleaved", 2, "vocab-1", 4, False, "learned_absolute", True),
    ("interleaved", 3, "vocab-2", 4, False, "rope", False),
    ("v-half", 2, "vocab-2", 5, False, "rope", False),
    ("v-half", 3, "vocab-1", 1, False, "rope", True),
    ("v-half", 4, "vocab-2", 8, False, "learned_absolute", False),
    ("zb-v", 3, "vocab-1", 4, False, "rope", False),
    ("v-min", 4, "vocab-2", 6, False, "rope", True),
    ("interlaced", 2, "vocab-1", 3, True, "learned_absolute", False),
    ("interlaced", 4, "vocab-1", 9, False, "rope", True),
]
SEVERAL_CHUNKS = {"interleaved", "v-half", "zb-v", "v-min"}


def _arguments(size: int, microbatches: int, tied: bool, positions: str, **changes: object) -> list[str]:
    # Few layers and a small learning rate: Adam turns the rounding of small gradients into whole updates, and two plain
    # runs that differ in the pipeline size alone drift apart by 1e-6 at 12 layers. Five updates still move every
    # gradient by far more than the bound.
    return tiny_model(
        **{"num_layers": size if size > 2 else 4, **changes},
        hidden_size=64,
        lr=1e-5,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * microbatches,
        train_iters=STEPS,
        eval_iters=1,
        eval_interval=2,  # evaluation between the steps, on the same processes
        untie_embeddings_and_output_weights=not tied,
        position_embedding_type=positions,
        # Many tokens and few words: sums over 128 positions, and dot products over 40 logits, keep plain Megatron's own
        # rounding at half of the bound. 39 tokens and the end of document make 40 rows, uneven on three ranks.
        seq_length=128,
        max_position_embeddings=128,
        vocab_size=39,
        make_vocab_size_divisible_by=4,
    )


@cache
def _plain(size: int, microbatches: int, tied: bool, positions: str, masked: bool, layers: int | None) -> Run:
    changes = {} if layers is None else {"num_layers": layers}
    return train(1, _arguments(size, microbatches, tied, positions, **changes), masked=masked)


@pytest.mark.parametrize(("schedule", "size", "algorithm", "microbatches", "tied", "positions", "masked"), CASES)
def test_parity(schedule, size, algorithm, microbatches, tied, positions, masked):
    # Two layers a chunk, or one, or 6 layers on 8 chunks, two of which are empty.
    layers = {"num_layers": 8 if size == 2 else 6} if schedule in SEVERAL_CHUNKS else {}
    split = train(
        size,
        _arguments(
            size,
            microbatches,
            tied,
            positions,
            pipeline_model_parallel_size=size,
            vocab_parallel=True,
            vocab_parallel_algorithm=algorithm,
            pipeline_schedule=schedule,
            num_virtual_stages_per_pipeline_rank=2 if schedule == "interleaved" else None,
            **layers,
        ),
        masked=masked,
    )
    plain = _plain(size, microbatches, tied, positions, masked, layers.get("num_layers"))
    assert len(split.steps) == STEPS and len(split.steps[0].microbatches) == microbatches
    assert_equal(split, plain, BOUND)


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_as_close_to_fp32_as_plain_megatron(precision, algorithm):
    options = {precision: True, **({"loss_scale": 1} if precision == "fp16" else {})}
    size, microbatches = 3, 4
    exact = train(1, _arguments(size, microbatches, False, "rope"))
    plain = train(1, _arguments(size, microbatches, False, "rope", **options))
    split = train(
        size,
        _arguments(
            size,
            microbatches,
            False,
            "rope",
            pipeline_model_parallel_size=size,
            vocab_parallel=True,
            vocab_parallel_algorithm=algorithm,
            **options,
        ),
    )
    assert_as_close(split, plain, exact)
