"""HybridModel, which Megatron builds from a pattern of layer types: attention and MLP layers, that run on a CPU.

The reference is plain Megatron in one process, with the same layers. A case is a line.
"""

from __future__ import annotations

import argparse

import pytest

from megatron_vp.mcore.pass_costs import pass_costs
from megatron_vp.schedule.passes import VocabMethod
from tests.harness.training import comparable_model, train
from tests.mcore.cases import FP32, TIED
from tests.mcore.comparison import assert_equal

VP = {"vocab_parallel": True}
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "read"), [((3, "*-|*|-", VP), (2, "*-|*-", {})), ((1, "*-*-", {}), (2, "*|-*-", VP))]
)
def test_a_checkpoint_continues_in_plain_megatron_and_back(tmp_path, written, read):
    (size, pattern, method), (other_size, other_pattern, other_method) = written, read
    steps = {"train_iters": 4, "lr": 1e-3, "eval_iters": 0}
    saving = {"save": tmp_path, "save_interval": 2, "exit_interval": 2}
    train(size, _arguments(pattern, pipeline_model_parallel_size=size, **steps, **saving, **method))
    rest = train(
        other_size,
        _arguments(other_pattern, pipeline_model_parallel_size=other_size, load=tmp_path, **steps, **other_method),
        same_weights=False,
    )
    whole = train(1, _arguments("*-*-", **steps))
    assert rest.losses == pytest.approx(whole.losses[2:], rel=2e-6)


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
