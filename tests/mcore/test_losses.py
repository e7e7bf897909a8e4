"""Test label smoothing and z-loss against Megatron in one process.

Both options are ours. In the reference, an eager loss, which is built on Megatron's own smoothed cross entropy,
replaces Megatron's loss. Each case is one line.
"""

from __future__ import annotations

from unittest import mock

import pytest

from tests.harness import Run, run_ranks, train
from tests.harness.training import comparable_model, train_case
from tests.mcore.case_parts import (
    FP32,
    TIED,
    way_options,
)
from tests.mcore.comparison import assert_equal

PER_TOKEN = {"calculate_per_token_loss": True}
slow = pytest.mark.slow

# p, schedule, algorithm, label smoothing, z-loss, options of both runs (vocab_shards of ours). Large coefficients, so
# that a wrong term shows.
CASES = [
    (2, "1f1b", "vocab-2", 0.2, 0.05, TIED),
    pytest.param(2, "interlaced", "vocab-1", 0.0, 0.05, {}, marks=slow),
    pytest.param(3, "1f1b", "vocab-2", 0.2, 0.0, {}, marks=slow),
    pytest.param(2, "interleaved", "vocab-2", 0.2, 0.05, PER_TOKEN, marks=slow),
    pytest.param(3, "v-half", "vocab-1", 0.2, 0.05, {}, marks=slow),
    pytest.param(2, "v-half", "vocab-2", 0.2, 0.05, {**TIED, "vocab_shards": "0,40"}, marks=slow),
]


def eager_loss(rank: int, world_size: int, arguments: list[str], label_smoothing: float, z_loss: float) -> Run | None:
    """Runs inside a rank: plain Megatron whose loss in training has both terms."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def compute_language_model_loss(self, labels, logits):
        smoothing, penalty = (label_smoothing, z_loss) if self.training else (0.0, 0.0)
        # Megatron's cross entropy overwrites the logits.
        loss = vocab_parallel_cross_entropy(logits.clone(), labels.t().contiguous(), smoothing, self.tp_group)
        return (loss + penalty * logits.logsumexp(-1) ** 2).t().contiguous()

    with mock.patch.object(LanguageModule, "compute_language_model_loss", compute_language_model_loss):
        return train_case(rank, world_size, arguments, masked=True)


@pytest.mark.parametrize(("size", "schedule", "algorithm", "smoothing", "z_loss", "options"), CASES)
def test_losses_and_gradients(size, schedule, algorithm, smoothing, z_loss, options):
    common = {"num_layers": 2 * size, "global_batch_size": 10, **options}
    shards = common.pop("vocab_shards", "even")
    (plain,) = run_ranks(1, eager_loss, comparable_model(**common), smoothing, z_loss)
    split = {
        **way_options(f"{schedule}/{algorithm}", size),
        "vocab_shards": shards,
        "vocab_label_smoothing": smoothing,
        "vocab_z_loss": z_loss,
    }
    assert_equal(train(size, comparable_model(**common, **split), masked=True), plain, FP32)
