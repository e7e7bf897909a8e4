"""Test that two runs of the same job give the same bits: losses, gradients of every step, weights."""

from __future__ import annotations

import pytest

from tests.harness import train
from tests.harness.training import tiny_model
from tests.mcore.case_parts import DROPOUT
from tests.mcore.comparison import assert_same_bits

OURS = {"pipeline_model_parallel_size": 2, "vocab_parallel": True}
V_HALF = {"pipeline_schedule": "v-half"}
INTERLEAVED = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
REPLICAS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = {
    "v-half, vocab-2, --deterministic-mode": (2, {**V_HALF, "deterministic_mode": True}),
    "interleaved, vocab-1": (2, {**INTERLEAVED, "vocab_parallel_algorithm": "vocab-1"}),
    "bf16, tied, dropout": (2, {**DROPOUT, "bf16": True, "untie_embeddings_and_output_weights": False}),
    "replicas, everything overlapped": (4, {**V_HALF, **REPLICAS}),
    "tensor and sequence parallelism": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "without --vocab-parallel": (2, {**V_HALF, "vocab_parallel": False}),
}
DEFAULT = "v-half, vocab-2, --deterministic-mode"


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == DEFAULT else pytest.mark.slow) for name in CASES]
)
def test_two_runs_give_the_same_bits(case):
    ranks, options = CASES[case]
    one, other = (train(ranks, tiny_model(**{**OURS, **options})) for _ in range(2))
    assert one.losses == other.losses and one.grad_norms == other.grad_norms
    for step, again in zip(one.steps, other.steps, strict=True):
        assert step.gradients and step.microbatches == again.microbatches
        assert_same_bits(step.gradients, again.gradients)
    assert_same_bits(one.parameters, other.parameters)
