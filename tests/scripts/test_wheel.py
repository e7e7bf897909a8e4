"""Test the wheel alone, in an empty folder: configurations by name, the commands and the training script.

Also test what pip does with it in a container that has its own PyTorch.
"""

from __future__ import annotations

import json
import os
import re
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
def built(tmp_path_factory):
    """The wheel's file."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "megatron_vp", source / "megatron_vp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "pretrain_gpt_vp.py"):
        shutil.copy(ROOT / name, source)
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", source, source)
    subprocess.run([sys.executable, "-m", *map(str, build)], check=True)
    (made,) = source.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(built, tmp_path_factory):
    """What `pip install` of the wheel would put into site-packages."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built) as archive:
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
    assert status == 2 and errors.startswith(
        "megatron-vp: error: llama4_8b is neither a file nor a configuration that comes with"
    )
    assert "llama3_70b, llama3_8b" in errors


def test_links_of_its_description_lead_somewhere_without_the_repository(wheel):
    (metadata,) = wheel.glob("megatron_vp-*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]+)\)", metadata.read_text())
    assert links and [link for link in links if not link.startswith("https://")] == []


@pytest.mark.slow
def test_a_script_of_ones_own_can_be_submitted(wheel, tmp_path):
    (tmp_path / "mine.py").touch()
    model = ("--tokenizer-type", "NullTokenizer", "--mock-data", "--eval-interval", "1000", "--lr", "1e-3", *TINY)
    words = ("megatron_vp", "sbatch", "--script", "mine.py", "--dry-run", "--cpu", "--vocab-parallel", *model)
    status, printed, errors = said(wheel, tmp_path, *words, "--nodes", "1", "--ntasks-per-node", "2")
    batch_file = wheel / "megatron_vp" / "slurm" / "pretrain.sbatch"
    assert status == 0 and f"{batch_file} --script mine.py --cpu" in printed, errors
    assert batch_file.with_name("launch.sh").is_file()


COMPILED = {
    **{"torch": "2.11.0a0+5e6a8e0a4a.nv26.06", "transformer_engine": "2.17.1+4f3a2b", "apex": "0.1"},
    **{"triton": "3.5.0+gitb0c64ff9", "numpy": "2.1.0", "flash_attn": "2.7.4.post1"},
}
"""As in NVIDIA's containers: versions that no index has."""


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """A Python that has such packages, as far as pip can see, and Megatron-Core of the release before."""
    folder = tmp_path_factory.mktemp("container")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version in {**COMPILED, "megatron_core": "0.18.2"}.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").touch()
    return folder / "bin" / "python"


def would_install(container, tmp_path, *words):
    """The names of what `pip install WORDS` would install or replace."""
    report = tmp_path / "report.json"
    index = ("pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "typing-extensions")
    if subprocess.run([container, "-m", *index], capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index here")
    pip = ("pip", "install", "--quiet", "--dry-run", "--report", str(report), *map(str, words))
    done = subprocess.run([container, "-m", *pip], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {each["metadata"]["name"].lower().replace("-", "_") for each in json.loads(report.read_text())["install"]}


@pytest.mark.slow
@pytest.mark.parametrize("constrained", [False, True])
def test_a_container_keeps_its_own_pytorch(built, container, tmp_path, constrained):
    pins = tmp_path / "constraint.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in COMPILED.items()))
    found = would_install(container, tmp_path, built, *(("--constraint", pins) if constrained else ()))
    assert {"megatron_vp", "megatron_core", "typer", "omegaconf"} <= found and not found & set(COMPILED)


def test_a_file_wins_over_a_name(tmp_path, monkeypatch):
    from megatron_vp.jobs.yaml_files import read_leaves

    monkeypatch.chdir(tmp_path)
    assert len(read_leaves(["llama3_8b", "methods/v-half"])) > 20
    (tmp_path / "llama3_8b").write_text("hidden_size: 64\n")
    assert [leaf.value for leaf in read_leaves(["llama3_8b"])] == [64]


@pytest.mark.slow
def test_it_checks_replays_and_trains(wheel, tmp_path):
    status, printed, errors = said(wheel, tmp_path, "megatron_vp", "check", "--ranks", "4", *JOB)
    assert status == 0 and "4 ranks" in printed, errors
    status, printed, errors = said(wheel, tmp_path, "megatron_vp", "replay", "--rank", "1", "--shapes-only", *JOB)
    assert status == 0 and "GiB" in printed, errors
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "megatron_vp.pretrain")
    status, printed, errors = said(wheel, tmp_path, *launch, *JOB)
    assert status == 0 and "iteration        2/       2" in printed, errors
