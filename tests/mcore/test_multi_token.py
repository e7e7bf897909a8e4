"""Multi-token prediction: every head's output layer is split, and all else is as in plain Megatron in one process.

A case is a line.
"""

from __future__ import annotations

from unittest import mock

import pytest

from tests.harness import run_ranks
from tests.harness.training import _merge, comparable_model, train_case
from tests.mcore.cases import FP32, MUP, TIED
from tests.mcore.comparison import assert_equal

PER_TOKEN = {"calculate_per_token_loss": True}
REPEATED = {"mtp_use_repeated_layer": True}
VP = {"vocab_parallel": True}
slow = pytest.mark.slow

# p, schedule, algorithm, heads beyond the first, options of both runs, options of the split one.
CASES = [
    (2, "1f1b", "vocab-2", 2, TIED, {}),
    pytest.param(3, "1f1b", "vocab-1", 1, PER_TOKEN, {}, marks=slow),
    pytest.param(2, "zb-h1", "vocab-2", 2, REPEATED, {}, marks=slow),
    pytest.param(2, "interleaved", "vocab-1", 1, {}, {}, marks=slow),
    pytest.param(2, "interleaved", "vocab-2", 2, TIED, {}, marks=slow),
    pytest.param(2, "interlaced", "vocab-1", 1, TIED, {}, marks=slow),
    pytest.param(2, "v-half", "vocab-2", 2, MUP, {}, marks=slow),
    pytest.param(3, "zb-v", "vocab-1", 1, TIED, {}, marks=slow),
    pytest.param(2, "1f1b", "vocab-2", 1, {}, {"pipeline_model_parallel_layout": "Et|tttmL"}, marks=slow),
    pytest.param(3, "1f1b", "vocab-2", 1, {"recompute_granularity": "selective"}, {}, marks=slow),
]


def watched(rank: int, world_size: int, arguments: list[str]) -> tuple:
    """Runs inside a rank: the training, and what it logged of the further heads: loss, accepted and counted tokens."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    logged = []

    def save(loss, correct, total, head, heads, **_groups):
        logged.append((head, loss.item(), correct.item(), total.item()))

    with mock.patch.object(MTPLossLoggingHelper, "save_metrics_to_tracker", save):
        return train_case(rank, world_size, arguments), logged


def _arguments(**changes: object) -> list[str]:
    return comparable_model(**{"position_embedding_type": "rope"} | changes)


@pytest.mark.parametrize(("size", "schedule", "algorithm", "heads", "options", "ours"), CASES)
def test_every_step_equals_plain_megatron(size, schedule, algorithm, heads, options, ours):
    common = {"num_layers": 6 if size == 3 else 4, "mtp_num_layers": heads, **options}
    ((plain, expected),) = run_ranks(1, watched, _arguments(**common))
    split = _arguments(
        **common,
        **ours,
        **VP,
        pipeline_model_parallel_size=size,
        vocab_parallel_algorithm=algorithm,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=2 if schedule == "interleaved" else None,
    )
    runs, logged = zip(*run_ranks(size, watched, split), strict=True)
    assert_equal(_merge(list(runs)), plain, FP32)
    assert not any(logged[:-1])
    assert len(logged[-1]) == len(expected) == 3 * 4 * heads
    for found, theirs in zip(logged[-1], expected, strict=True):
        assert found == pytest.approx(theirs, rel=FP32)
