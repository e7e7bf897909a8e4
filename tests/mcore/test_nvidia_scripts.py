"""Test `megatron_vp.enable` with NVIDIA's own scripts: every step equals plain Megatron's."""

from __future__ import annotations

import pytest

from tests.harness.training import comparable_model, train
from tests.mcore.case_parts import FP32, TIED
from tests.mcore.comparison import assert_equal
from tests.mcore.nvidia_script import NvidiaScript, needs_checkout

pytestmark = needs_checkout
slow = pytest.mark.slow

HYBRID = {
    "num_layers": None,
    "spec": ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"],
    "position_embedding_type": "rope",
}
VOCAB_2 = {"vocab_parallel": True, "vocab_shards": "even"}
V_HALF = {**VOCAB_2, "vocab_parallel_algorithm": "vocab-1", "pipeline_schedule": "v-half"}

# The script, what `enable` is called with, options of both runs, pattern of a hybrid model.
CASES = [
    ("pretrain_gpt.py", VOCAB_2, TIED, None),
    pytest.param("pretrain_gpt.py", V_HALF, {}, None, marks=slow),
    ("pretrain_hybrid.py", VOCAB_2, {}, "*-|*-"),
    pytest.param("pretrain_hybrid.py", V_HALF, TIED, "*-|*||-", marks=slow),
]


@pytest.mark.parametrize(("name", "settings", "options", "pattern"), CASES)
def test_every_step_equals_plain_megatron(name, settings, options, pattern):
    plain_options, split_options = options, {**options, "pipeline_model_parallel_size": 2}
    if pattern is not None:
        plain_options = {**options, **HYBRID, "hybrid_layer_pattern": pattern.replace("|", "")}
        split_options = {**split_options, **HYBRID, "hybrid_layer_pattern": pattern}
    plain = train(1, comparable_model(**plain_options), script=NvidiaScript(name))
    split = train(2, comparable_model(**split_options), script=NvidiaScript(name, settings))
    assert (plain.rows_on, split.rows_on) == ([40], [24, 16])
    assert_equal(split, plain, FP32)
