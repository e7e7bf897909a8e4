"""HybridModel, which Megatron builds from a pattern of layer types: attention and MLP layers, that run on a CPU.

The reference is plain Megatron in one process, with the same layers. A case is a line.
"""

from __future__ import annotations

import argparse

import pytest

from megatron_vp.mcore.training.pass_costs import pass_costs
from megatron_vp.schedule.passes import VocabMethod
from tests.harness.training import comparable_model, train
from tests.mcore.case_parts import FP32, TIED
from tests.mcore.comparison import assert_equal

slow = pytest.mark.slow

# p, schedule, algorithm, pattern, options of both runs.
CASES = [
    (2, "1f1b", "vocab-2", "*-|*-", TIED),
    (2, "v-half", "vocab-2", "*-|*||-", {}),
    pytest.param(3, "1f1b", "vocab-1", "*-*|-|--*", {}, marks=slow),
    pytest.param(2, "1f1b", "vocab-2", "*-*-", {"normalization": "RMSNorm", "swiglu": True}, marks=slow),
    pytest.param(2, "zb-h1", "vocab-2", "*-|*-", {}, marks=slow),
    pytest.param(2, "interleaved", "vocab-1", "*-|*|-|-", {}, marks=slow),
    pytest.param(3, "v-half", "vocab-1", "*|-|*-||*|-", TIED, marks=slow),
    pytest.param(2, "interlaced", "vocab-1", "*-|*-", {}, marks=slow),
    pytest.param(2, "zb-h1", "none", "*-|*-", TIED, marks=slow),
    pytest.param(2, "v-half", "none", "*-|*||-", {}, marks=slow),
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
    split = train(
        size,
        _arguments(
            pattern,
            **options,
            pipeline_model_parallel_size=size,
            vocab_parallel=algorithm != "none",
            vocab_parallel_algorithm=None if algorithm == "none" else algorithm,
            pipeline_schedule=schedule,
        ),
    )
    assert_equal(split, plain, FP32)


def test_pass_costs_count_the_layers_of_a_pattern():
    sizes = {
        "hidden_size": 8,
        "pipeline_model_parallel_size": 2,
        "num_attention_heads": 2,
        "kv_channels": 4,
        "group_query_attention": False,
        "ffn_hidden_size": 32,
        "swiglu": False,
        "seq_length": 16,
        "padded_vocab_size": 64,
    }

    def costs(pattern, heads=None):
        layers = 2 if pattern is None else len(pattern.replace("|", ""))
        arguments = argparse.Namespace(**sizes, num_layers=layers, hybrid_layer_pattern=pattern, mtp_num_layers=heads)
        return pass_costs(arguments, VocabMethod.VOCAB_2)

    assert costs("*-|*-/*-/*-") == costs(None)
    assert costs(None, heads=2).T == 3 * costs(None).T
    assert costs("-|-").W == costs("-|-").F  # no product without weights
    assert costs("M|M").S > costs("MM|MM").S > costs("MM|MM*").S
