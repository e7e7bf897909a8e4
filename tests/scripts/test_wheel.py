"""The wheel alone, in an empty folder: configurations by name, the command and the training script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size", "64"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--pipeline-model-parallel-size", "2"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "2", "--vocab-size", "256"),
    *("--num-query-groups", "4", "--eval-iters", "0", "--make-vocab-size-divisible-by", "64"),
    *("--lr-warmup-iters", "0", "--log-interval", "1"),
)
JOB = ("--config", "llama3_8b", "--config", "data/mock", "--cpu", "--vocab-parallel", *TINY)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What `pip install` of the wheel would put into site-packages."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "megatron_vp", source / "megatron_vp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "pretrain_gpt_vp.py"):
        shutil.copy(ROOT / name, source)
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", source, source)
    subprocess.run([sys.executable, "-m", *map(str, build)], check=True)
    (made,) = source.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
    return site


def said(wheel, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_configurations_have_names(wheel, tmp_path):
    status, printed, errors = said(wheel, tmp_path, "megatron_vp", "simulate", "llama3_8b", "--nodes", "4")
    assert status == 0 and "tokens" in printed, errors
    status, _, errors = said(wheel, tmp_path, "megatron_vp", "simulate", "llama4_8b", "--nodes", "4")
    assert status == 2 and errors.startswith("megatron-vp: error: llama4_8b is neither a file nor a configuration of")
    assert "llama3_70b, llama3_8b" in errors


def test_a_page_for_the_browser_can_be_made(wheel, tmp_path):
    words = ("megatron_vp", "schedule", "1f1b", "-p", "2", "-m", "2", "-o", "page.html")
    assert said(wheel, tmp_path, *words) == (0, "", "") and (tmp_path / "page.html").stat().st_size > 10_000


def test_a_file_wins_over_a_name(tmp_path, monkeypatch):
    from megatron_vp.jobs.yaml_files import read_leaves

    monkeypatch.chdir(tmp_path)
    assert len(read_leaves(["llama3_8b", "methods/v-half"])) > 20
    (tmp_path / "llama3_8b").write_text("hidden_size: 64\n")
    assert [leaf.value for leaf in read_leaves(["llama3_8b"])] == [64]


@pytest.mark.slow
def test_it_checks_replays_and_trains(wheel, tmp_path):
    status, printed, errors = said(wheel, tmp_path, "megatron_vp", "check", "--ranks", "2", *JOB)
    assert status == 0 and "2 ranks" in printed, errors
    status, printed, errors = said(wheel, tmp_path, "megatron_vp", "replay", "--rank", "1", "--shapes-only", *JOB)
    assert status == 0 and "GiB" in printed, errors
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron_vp.pretrain")
    status, printed, errors = said(wheel, tmp_path, *launch, *JOB)
    assert status == 0 and "iteration        2/       2" in printed, errors
