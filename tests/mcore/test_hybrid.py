"""Test HybridModel, which Megatron builds from a pattern of layer types, with attention and MLP layers, on CPU.

The reference is plain Megatron in one process with the same layers. Each case is one line.
"""

from __future__ import annotations

import pytest

from megatron_vp.mcore import patches
from tests.harness.training import comparable_model, train
from tests.mcore.case_parts import (
    FP32,
    TIED,
    way_options,
)
from tests.mcore.comparison import assert_equal

slow = pytest.mark.slow

# p, schedule, algorithm, pattern, options of both runs.
CASES = [
    (2, "1f1b", "vocab-2", "*-|*-", TIED),
    (2, "v-half", "vocab-2", "*-|*||-", {}),
    pytest.param(3, "1f1b", "vocab-1", "*-*|-|--*", {}, marks=slow),
    pytest.param(2, "zb-h1", "vocab-2", "*-*-", {"normalization": "RMSNorm", "swiglu": True}, marks=slow),
    pytest.param(3, "v-half", "vocab-1", "*|-|*-||*|-", TIED, marks=slow),
    pytest.param(2, "interlaced", "vocab-1", "*-|*-", {}, marks=slow),
    pytest.param(2, "1f1b", "vocab-2", "*-|*-/*-/*-", {}, marks=slow),
    pytest.param(2, "interleaved", "vocab-1", "*|-|*|-/*-", {}, marks=slow),
]


def _arguments(pattern: str, **changes: object) -> list[str]:
    arguments = {
        "num_layers": None,
        "hybrid_layer_pattern": pattern,
        "spec": ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"],
        "position_embedding_type": "rope",
    }
    return comparable_model(**arguments | changes)


@pytest.mark.parametrize(("size", "schedule", "algorithm", "pattern", "options"), CASES)
def test_every_step_equals_plain_megatron(size, schedule, algorithm, pattern, options):
    plain = train(1, _arguments(pattern.replace("|", ""), **options))
    way = way_options(f"{schedule}/{algorithm}", size, hybrid_layer_pattern=pattern)
    split = train(size, _arguments(pattern, **options, **way))
    assert_equal(split, plain, FP32)


@pytest.mark.skipif(
    patches.present_series() == "0.19", reason="megatron-core 0.19 loads no GPT checkpoint into a HybridModel"
)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("v-half", marks=slow)])
def test_a_gpt_checkpoint_goes_on_as_a_hybrid_model(tmp_path, schedule):
    def go_on(size: int, pattern: str, **ours: object):
        where = {"pipeline_model_parallel_size": size, **ours}
        folder = tmp_path / str(size)
        train(size, comparable_model(position_embedding_type="rope", save=folder, save_interval=1000, **where))
        until = {"train_iters": 6, "load": folder, "override_opt_param_scheduler": True}
        return train(size, _arguments(pattern, **until, **where), same_weights=False)

    plain = go_on(1, "*-*-*-*-")
    pattern = {"1f1b": "*-*-|*-*-", "v-half": "*-|*-|*-|*-"}[schedule]
    split = go_on(2, pattern, vocab_parallel=True, pipeline_schedule=schedule)
    assert len(plain.steps) == 3 and split.rows_on == [24, 16]
    assert_equal(split, plain, FP32)
