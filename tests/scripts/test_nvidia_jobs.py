"""Test how the script reads NVIDIA's jobs, with an artificial checkout."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 64
  --max-position-embeddings: 64
  --micro-batch-size: 1
  --global-batch-size: 8
  --train-iters: 5
  --eval-interval: 5
  --lr: 1e-4
  --bf16: true
  --transformer-impl: local
  --tokenizer-type: NullTokenizer
  --vocab-size: 511
  --data-path: ${DATA_PATH}/text
  --pipeline-model-parallel-size: 2
"""
EXAMPLE = """#!/bin/bash
# torchrun pretrain_gpt.py --pipeline-model-parallel-size 16
LAYERS=8
NODES=${NODES:-2}
WIDTH=$((4*$NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node 8
)
MODEL_ARGS=(
    --num-layers $LAYERS   # of them
    --tensor-model-parallel-size ${WIDTH}
    "--split '99,1,0'"
)
MORE=" \\
    --bf16 \\
    --load ${WHERE}/there"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${MORE}
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("nvidia_jobs", ROOT / "scripts" / "nvidia_jobs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def checkout(tmp_path):
    cases = tmp_path / "tests" / "functional_tests" / "test_cases"
    for name, text in {
        "gpt/plain": TEST,
        "gpt/staged": TEST + "  --num-layers-per-virtual-pipeline-stage: 1\n",
        "gpt/graphs": TEST.replace("local", "transformer_engine") + "  --overlap-moe-expert-parallel-comm: true\n",
        "gpt/asked": TEST + "MODE: inference\n",
        "bert/other": TEST,
    }.items():
        (cases / name).mkdir(parents=True)
        (cases / name / "model_config.yaml").write_text(text)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.sh").write_text(EXAMPLE)
    (tmp_path / "examples" / "serve.sh").write_text("python serve.py --bf16\n")
    return tmp_path


def test_every_job_is_judged_under_its_own_schedule_and_under_v_half(script, checkout):
    answers = {job.name: job.answers() for job in script.functional_tests(checkout)}
    assert answers.keys() == {"plain", "staged", "graphs"}
    assert answers["plain"] == answers["staged"] == (None, None, None)
    (refused,) = answers["graphs"]
    assert "AssertionError" in refused and "\n" not in refused


def test_a_shell_script_gives_what_it_would_start(script, checkout):
    (job,) = script.examples(checkout)
    assert job.words == (
        *("--num-layers", "8", "--tensor-model-parallel-size", "8", "--split", "99,1,0"),
        *("--bf16", "--load", "/NOWHERE/WHERE/there"),
    )
