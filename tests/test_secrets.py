"""Test that no file and no line that a run or a command leaves contains secrets of the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import run_ranks_to_their_end
from tests.harness.training import tiny_model

ROOT = Path(__file__).parents[1]
NAMES = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "NGC_CLI_API_KEY", "GITHUB_PAT")
MARK = "5ec2e7d1"
"""In every planted secret; those of W&B have 40 characters."""

LEAKY = "model: {{num_layers: 4}}\nnames: {{wandb_exp_name: 'x${{oc.env:{}}}'}}\n"
MOCK = ("configs/llama3_8b.yaml", "--config", "configs/data/mock.yaml")
COMMANDS = {
    "env": ("env",),
    "sbatch": ("sbatch", *MOCK, "--nodes", "1", "--dry-run"),
    "simulate of a leaky file": ("simulate", "FOLDER/leaky.yaml"),
}


@pytest.fixture
def planted(tmp_path):
    """An environment with secrets in it; what a process would leave in a home directory comes to the folder, too."""
    secrets = {name: f"{MARK}{number:032x}" for number, name in enumerate(NAMES)}
    own = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "WANDB_MODE": "offline"}
    for folder in ("home", "tmp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "leaky.yaml").write_text(LEAKY.format("WANDB_API_KEY"))
    return {**os.environ, **secrets, **own, "MEGATRON_VP_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where the secrets are: names of files, and lines."""
    files = [path for path in folder.rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]
    return [*map(str, files), *(line for text in texts for line in text.splitlines() if MARK in line)]


def test_the_search_finds_what_is_there(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "binary").write_bytes(b"\0\xff" + MARK.encode() + b"\xfe")
    assert leaks(tmp_path, f"a\nb{MARK}c\nd") == [str(tmp_path / "deep" / "binary"), f"b{MARK}c"]


@pytest.mark.parametrize("what", COMMANDS)
def test_commands_leave_no_secret(planted, tmp_path, what):
    words = [word.replace("FOLDER", str(tmp_path)) for word in COMMANDS[what]]
    command = [sys.executable, "-m", "megatron_vp.cli.app", *words]
    done = subprocess.run(command, env=planted, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "leaky" in what else 0), done.stderr
    assert not leaks(tmp_path, done.stdout, done.stderr)


def job(folder: Path) -> list[str]:
    """The arguments of a training run of two ranks that leaves all that a run can leave, in `folder`."""
    options = {
        **{"pipeline_model_parallel_size": 2, "vocab_parallel": True, "train_iters": 4, "cpu": True},
        **{"save": folder / "checkpoints", "save_interval": 2, "tensorboard_dir": folder / "tensorboard"},
        **{"rank_report": folder / "report", "pipeline_trace": folder / "trace"},
        **{"wandb_project": "project", "wandb_exp_name": "name", "log_params_norm": True},
    }
    return tiny_model(**options)


def start(_rank: int, _world_size: int, environment: dict[str, str], folder: Path) -> None:
    """`job`, in a rank of the harness."""
    os.environ.update({name: value for name, value in environment.items() if MARK in value or str(folder) in value})
    os.environ["WANDB_MODE"] = environment["WANDB_MODE"]
    os.chdir(folder)
    sys.argv = ["pretrain_gpt_vp.py", *job(folder)]
    import pretrain_gpt_vp

    pretrain_gpt_vp.prepare()
    pretrain_gpt_vp.main()


def test_a_run_leaves_no_secret(planted, tmp_path):
    ends = run_ranks_to_their_end(2, start, planted, tmp_path)
    said = [output for _, output in ends]
    assert [status for status, _ in ends] == [0, 0], said
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert {"checkpoints", "tensorboard", "report", "trace"} <= left
    (curves,) = tmp_path.rglob("*.wandb")
    assert b"hidden_size" in curves.read_bytes(), "what W&B writes can be searched"
    assert "iteration        4/" in "".join(said) and not leaks(tmp_path, *said)
