"""The memory that `simulate` predicts against what `replay --shapes-only` counts, for the same job and layers."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.harness.ranks import run_ranks

BOUND = 0.03
"""Of the bytes of tensors at a rank's peak; docs/cost_model.md names it."""

CONFIG = "configs/llama3_8b.yaml"
SMALL = [
    *("--num-layers", "8", "--hidden-size", "256", "--ffn-hidden-size", "768", "--num-attention-heads", "8"),
    *("--num-query-groups", "2", "--seq-length", "2048", "--max-position-embeddings", "2048", "--vocab-size", "2000"),
    *("--pipeline-model-parallel-size", "4", "--global-batch-size", "16"),
]
GPT = [
    *("--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "8", "--seq-length", "2048"),
    *("--max-position-embeddings", "2048", "--vocab-size", "2000", "--pipeline-model-parallel-size", "4"),
    *("--global-batch-size", "16"),
]
LOCAL, SDPA = ["--transformer-impl", "local"], ["--core-attention", "sdpa"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SEQUENCE_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def _counted(_rank, _world_size, config, job_rank, flags):
    from megatron_vp.mcore.replay.one_rank import run_alone

    with contextlib.redirect_stdout(io.StringIO()):
        return run_alone("pretrain_gpt_vp.py", [config], job_rank, None, 1, flags, True).memory_bytes["peak"]


def _predicted(config, pipeline_rank, flags):
    from megatron_vp.cost.hardware import HARDWARE
    from megatron_vp.cost.job_plan import plan_of
    from megatron_vp.cost.job_sizes import job_of
    from megatron_vp.cost.predict import predict
    from megatron_vp.cost.rank_memory import WORKSPACES
    from megatron_vp.jobs.job_config import read_sizes

    read = read_sizes([config], flags)
    found = predict(job_of(read.values), plan_of(read), HARDWARE["h100"]).memory[pipeline_rank]
    return found.allocated - WORKSPACES


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("config", "flags", "pipeline_rank"),
    [
        (CONFIG, SMALL, 0),
        (CONFIG, [*SMALL, *LOCAL], 0),
        (CONFIG, [*SMALL, *SEQUENCE_PARALLEL], 1),
        slow(CONFIG, [*SMALL, *SDPA], 0),
        slow(CONFIG, [*SMALL, "--qk-layernorm"], 1),
        slow(CONFIG, [*SMALL, *SDPA, "--qk-layernorm"], 1),
        slow(CONFIG, [*SMALL, *RECOMPUTE], 0),
        slow("configs/gpt_4b.yaml", GPT, 0),
        slow("configs/gpt_4b.yaml", [*GPT, *SDPA, "--hidden-dropout", "0.1"], 0),
    ],
)
def test_prediction_and_count_agree(config, flags, pipeline_rank):
    tensor = 2 if "--tensor-model-parallel-size" in flags else 1
    (counted,) = run_ranks(1, _counted, config, pipeline_rank * tensor, flags)
    assert _predicted(config, pipeline_rank, flags) == pytest.approx(counted, rel=BOUND)
