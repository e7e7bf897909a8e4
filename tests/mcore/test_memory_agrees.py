"""Test the memory that `simulate` predicts against the count of `replay --shapes-only`, for the same job and layers."""

from __future__ import annotations

import contextlib
import io
import statistics
import sys

import pytest

from megatron_vp.schedule import PassCosts, generate, to_json
from tests.harness.ranks import ROOT, run_ranks

sys.path.append(str(ROOT / "benchmarks"))

from memory_agrees import MEAN, MOST, PLACES, TWENTY, agreement, table_of

BOUND = 0.03
"""Of the bytes of tensors at a rank's peak; docs/evidence/predictions.md names it."""

CONFIG = "configs/llama3_8b.yaml"
SMALL = [
    *("--num-layers", "8", "--hidden-size", "256", "--ffn-hidden-size", "768", "--num-attention-heads", "8"),
    *("--num-query-groups", "2", "--seq-length", "2048", "--max-position-embeddings", "2048", "--vocab-size", "2000"),
    *("--pipeline-model-parallel-size", "4", "--global-batch-size", "16"),
]
GEMMA = ["--kv-channels", "32", "--pipeline-model-parallel-layout", "Et*2|t*2|t*2|t*2L"]
"""What its configuration sets for the real sizes."""
SDPA = ["--core-attention", "sdpa"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
V_HALF = ["--pipeline-schedule", "v-half"]
MANY_ROWS = [*SMALL, "--vocab-size", "32000", "--vocab-parallel", "--vocab-shards", "2560,2560,2560,24320"]
OFFLOADED = [
    *("--pipeline-model-parallel-size", "8", "--tensor-model-parallel-size", "1", "--global-batch-size", "32"),
    *("--vocab-size", "128256", "--vocab-parallel", *SDPA),
]
SEQUENCE_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def _counted(_rank, _world_size, config, job_rank, flags):
    from megatron_vp.mcore.replay.one_rank import run_alone

    with contextlib.redirect_stdout(io.StringIO()):
        return run_alone("pretrain_gpt_vp.py", [config], job_rank, None, 1, flags, True).memory_bytes["peak"]


def _predicted(config, pipeline_rank, flags):
    from megatron_vp.cost.hardware.gpus import HARDWARE
    from megatron_vp.cost.layers.job_plan import plan_of
    from megatron_vp.cost.layers.job_sizes import job_of
    from megatron_vp.cost.planning.own_plan import with_shards
    from megatron_vp.cost.planning.predict import predict
    from megatron_vp.cost.ranks.rank_memory import WORKSPACES
    from megatron_vp.jobs.job_config import read_sizes

    read, hardware = read_sizes([config], flags), HARDWARE["h100"]
    job = job_of(read)
    plan = with_shards(read, plan_of(read), job, hardware, memory_limit=hardware.memory)
    found = predict(job, plan, hardware).memory[pipeline_rank]
    return found.allocated - WORKSPACES


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("config", "flags", "pipeline_rank"),
    [
        slow(CONFIG, SMALL, 0),
        (CONFIG, [*SMALL, *SEQUENCE_PARALLEL, *V_HALF, "--vocab-parallel"], 3),
        ("configs/gemma2_9b.yaml", [*SMALL, *GEMMA], 3),
        slow(CONFIG, MANY_ROWS, 3),
        slow(CONFIG, [*SMALL, *SDPA, "--context-parallel-size", "2", "--qk-layernorm"], 0),
        slow(CONFIG, [*SMALL, *RECOMPUTE], 3),
    ],
)
def test_prediction_and_count_agree(config, flags, pipeline_rank):
    beside = 2 if {"--tensor-model-parallel-size", "--context-parallel-size"} & set(flags) else 1
    (counted,) = run_ranks(1, _counted, config, pipeline_rank * beside, flags)
    assert _predicted(config, pipeline_rank, flags) == pytest.approx(counted, rel=BOUND)


@pytest.mark.slow
def test_they_agree_where_chunks_wait_in_the_hosts_memory(tmp_path):
    """As totals, and in what each chunk that leaves takes with it; the order comes from a file, so that all leave."""
    counted, predicted = {}, {}
    for chunks in (0, 2, 4):
        path = tmp_path / f"{chunks}.json"
        costs = PassCosts(other={"copy": 0.75})
        path.write_text(to_json(generate("po", 8, 32, vocab="vocab-2", chunks=4, costs=costs, offload_chunks=chunks)))
        flags = [*OFFLOADED, "--pipeline-schedule", str(path)]
        (counted[chunks],) = run_ranks(1, _counted, CONFIG, 0, flags, timeout=600)
        predicted[chunks] = _predicted(CONFIG, 0, flags)
        assert predicted[chunks] == pytest.approx(counted[chunks], rel=BOUND)
    for chunks in (2, 4):
        assert predicted[0] - predicted[chunks] == pytest.approx(counted[0] - counted[chunks], rel=BOUND)


@pytest.mark.slow
def test_they_agree_on_twenty_jobs_that_people_train():
    """`benchmarks/memory_agrees.py` prints the same."""
    lines = [agreement(job, place, {}) for job in TWENTY for place in PLACES]
    assert len(lines) == 60 and not [line for line in lines if "error" in line], table_of(lines)
    off = [abs(line["off"]) for line in lines]
    assert statistics.mean(off) <= MEAN and max(off) <= MOST, table_of(lines)
