"""Test `megatron-vp check` and `megatron-vp sbatch`, without a cluster."""

import argparse
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from megatron_vp.cli.app import main
from megatron_vp.jobs.shipped import BATCH_FILES
from megatron_vp.mcore import patches
from megatron_vp.mcore.platform import installed
from tests.harness.training import tiny_model

LLAMA = ("configs/llama3_8b.yaml", "--config", "configs/data/mock.yaml")


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs the command in the repository, for CPUs; returns its exit status, output and errors."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("MEGATRON_VP_CPU", "1")

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        return (stop.value.code, *capsys.readouterr())

    return run


def test_dry_run_prints_what_would_be_submitted(said):
    status, printed, _ = said(
        *("sbatch", *LLAMA, "--nodes", "4", "--vocab-parallel", "--lr", "1e-4"),
        *("--slurm", "time=1:00:00", "--slurm", "--qos=high", "--slurm", "", "--dry-run"),
    )
    job, *_, checkpoints, command = printed.splitlines()
    assert status == 0
    assert job == "4 nodes x 8 ranks; 32 ranks = 8 pipeline x 4 data; 128 microbatches; 1f1b, vocab-2"
    assert checkpoints == "the job saves to runs/llama3_8b/checkpoints, and resumes from there"
    assert shlex.split(command) == [
        *("sbatch", "--nodes=4", "--gpus-per-node=8", "--job-name=llama3_8b"),
        *(f"--export=ALL,MEGATRON_VP_PYTHON={sys.executable}", "--time=1:00:00", "--qos=high"),
        *("scripts/slurm/pretrain.sbatch", *LLAMA, "--vocab-parallel", "--lr", "1e-4"),
    ]


def test_a_script_of_ones_own_from_any_folder(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("print('not run here')")
    words = ("sbatch", "--script", "mine.py", *tiny_model(), "--nodes=2", "--ntasks-per-node=1", "--my-option=3")
    monkeypatch.setenv("MEGATRON_VP_CONTAINER_IMAGE", "me/image:1")
    status, printed, errors = said(*words, "--pipeline-model-parallel-size=2", "--vocab-parallel", "--dry-run")
    assert status == 0, errors
    command = shlex.split(printed.splitlines()[-1])
    assert command[:4] == ["sbatch", "--nodes=2", "--ntasks-per-node=1", "--job-name=mine"]
    assert command[4] == f"--export=ALL,MEGATRON_VP_SLURM={BATCH_FILES}", "the image has a Python of its own"
    assert command[5:8] == [str(BATCH_FILES / "pretrain.sbatch"), "--script", "mine.py"]
    assert "--my-option=3" in command and (BATCH_FILES / "launch.sh").is_file()


def test_inputs_that_are_elsewhere_do_not_stop_a_dry_run(said):
    status, printed, errors = said("sbatch", "configs/llama3_8b.yaml", "--dry-run")
    assert status == 0
    assert printed.splitlines()[-1].startswith("sbatch --nodes=1")
    assert "the job would not start on this machine" in errors and "data/llama3_tokenizer" in errors


def test_submission_goes_through_sbatch(said, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(
        '#!/bin/sh\n[ "$1" = --nodes=1 ] && echo Submitted batch job 7 && exit\n'
        '[ "$1" = --nodes=2 ] && echo no such partition >&2; exit 1\n'
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    status, printed, _ = said("sbatch", *LLAMA)
    assert (status, printed.splitlines()[-1]) == (0, "Submitted batch job 7")
    status, _, errors = said("sbatch", *LLAMA, "--nodes", "2")
    assert (status, errors) == (2, "megatron-vp: error: no such partition\n")
    monkeypatch.setenv("PATH", "")
    status, _, errors = said("sbatch", *LLAMA)
    assert status == 2 and "sbatch was not found" in errors


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("sbatch", *LLAMA, "--no-such-flag", "--dry-run"), "unrecognized arguments: --no-such-flag"),
        (("sbatch", *LLAMA, "--partition", "long"), "; pass options of SLURM's sbatch on with --slurm"),
        (("sbatch", "--script", "nowhere.py", "--dry-run"), "--script nowhere.py is not a file"),
        (("sbatch", "--vocab-parallel"), "the job has no configuration file: give CONFIG first"),
        (
            ("sbatch", *LLAMA, "--nodes", "3", "--gpus-per-node", "5", "--dry-run"),
            "world size (15) is not divisible by total_model_size (total_model_size=8)",
        ),
        (("sbatch", "configs/llama3_8b.yaml"), "data/llama3_tokenizer"),
        (("check", "--ranks", "1", "--config", "configs/quickstart.yaml"), "world size (1) is not divisible"),
        (("check", "--ranks", "8", *LLAMA, "--load", "configs"), "no checkpoint"),
        (("check", "--ranks", "8", *LLAMA, "--tensorboard-dir", "setup.py"), "is a file"),
    ],
)
def test_bad_input_is_one_line(said, words, line):
    status, _, errors = said(*words)
    assert status == 2
    (said_once,) = [each for each in errors.splitlines() if "error:" in each]
    assert line in said_once


def test_a_check_takes_the_sizes_that_a_checkpoint_holds_under_use_checkpoint_args(said, tmp_path):
    folder = tmp_path / "iter_0000002" / "mp_rank_00_000"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    written_by = argparse.Namespace(num_layers=6, hidden_size=32, num_attention_heads=4)
    torch.save({"args": written_by, "iteration": 2}, folder / "model_optim_rng.pt")
    left_out = {"num_layers": None, "hidden_size": None, "num_attention_heads": None}
    found = {"load": tmp_path, "ckpt_format": "torch", "pipeline_model_parallel_size": 2}
    status, printed, errors = said("check", "--ranks", "2", *tiny_model(**found, **left_out, use_checkpoint_args=True))
    assert status == 0, errors
    assert "2 ranks = 2 pipeline x 1 data" in printed and "Setting" not in printed
    status, _, errors = said("check", "--ranks", "2", *tiny_model(**found, **left_out))
    assert status == 2 and "num-layers" in errors


def test_a_check_leaves_nothing_behind(said, tmp_path, monkeypatch):
    before = dict(os.environ), list(sys.argv), patches.in_force()
    (tmp_path / "afresh.yaml").write_text("checkpoints: {load: null}")
    words = ("--config", LLAMA[0], "--config", LLAMA[2], "--config", str(tmp_path / "afresh.yaml"), "--vocab-parallel")
    status, printed, _ = said("check", "--ranks", "8", *words, f"--save={tmp_path / 'new'}")
    assert status == 0
    assert "but --load is not given: a stopped job does not resume" in printed
    assert (dict(os.environ), list(sys.argv), patches.in_force()) == before
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert said("check", "--ranks", "8", *words)[:2] == (0, ""), "one rank says what all have found"
    assert not (tmp_path / "new").exists()


ENGINE = ("--transformer-impl", "transformer_engine")
CONTEXT = ("--context-parallel-size", "2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a node with GPUs says what it has")
@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (ENGINE, 0, "assuming compute capability 9.0 and Transformer Engine 2.20.2"),
        (
            (*ENGINE, "--pipeline-schedule", "v-half", "--num-experts", "8", "--moe-permute-fusion"),
            0,
            "v-half, vocab-2",
        ),
        (("--distributed-backend=nccl",), 0, "assuming compute capability 9.0, without"),
        ((*ENGINE, *CONTEXT), 2, "require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1"),
        ((*ENGINE, "--core-attention", "sdpa"), 2, "Transformer Engine's layers have their own attention"),
        (("--distributed-backend=nccl", "--cpu"), 2, "--distributed-backend nccl cannot work without a CUDA device"),
        (CONTEXT, 2, "use --core-attention sdpa"),
    ],
)
def test_a_login_node_checks_a_job_for_the_gpus_that_it_asks_for(said, monkeypatch, words, status, expected):
    monkeypatch.delenv("MEGATRON_VP_CPU")
    monkeypatch.setattr(installed, "here", installed.Installed)
    found, printed, errors = said("check", "--ranks", "16", *LLAMA, "--vocab-parallel", *words)
    assert found == status and expected in printed + errors
    assert installed.of_nodes is None and not torch.cuda.is_available()
    if words is ENGINE:
        assert said("sbatch", *LLAMA, "--vocab-parallel", *words, "--dry-run")[0] == 0


def test_a_login_node_says_that_it_assumes_and_can_be_told_what_nodes_have(said, monkeypatch):
    monkeypatch.delenv("MEGATRON_VP_CPU")
    words = ("sbatch", *LLAMA, "--vocab-parallel", "--dry-run", "--nodes=1")
    status, printed, _ = said(*words)
    assumed, job, *_ = printed.splitlines()
    assert status == 0 and job.startswith("1 node x 8 ranks")
    assert assumed.startswith("this machine has no GPU, so the check assumed what the nodes have: describe")
    status, _, errors = said(*words, "--fp8-format", "hybrid")
    assert status == 2 and "--fp8-format and --transformer-impl local cannot" in errors and f"; {assumed}" in errors
    status, printed, errors = said(
        *words, "--fp8-format=hybrid", "--fp8-recipe=tensorwise", "--node-software", "te=2.20.0,apex=no"
    )
    assert status == 0 and "local layers" not in printed and "Transformer Engine 2.20.0" in printed, errors


def test_a_job_that_cannot_switch_later_is_told_how_it_could(said):
    save = {"save": "there", "save_interval": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}

    def told(**changes):
        _, printed, _ = said("check", "--ranks", "2", *tiny_model(**save | changes))
        return [line for line in printed.splitlines() if "--dist-ckpt-optim-fully-reshardable" in line]

    (line,) = told(vocab_parallel=True)
    assert line.startswith(
        "warning: only a run with the same model split, with --vocab-parallel, can load the optimizer state"
    )
    (line,) = told()
    assert line.startswith("warning: only a run with the same model split, without --vocab-parallel, can load")
    assert not told(dist_ckpt_optim_fully_reshardable=True) and not told(use_distributed_optimizer=None)
    assert not told(save=None, save_interval=None)


def test_a_check_of_a_node_names_it(said, tmp_path, monkeypatch):
    words = ("check", "--ranks", "8", *LLAMA, f"--tensorboard-dir={tmp_path / 'tb'}")
    words += (f"--save={tmp_path / 'save'}", f"--load={tmp_path / 'save'}", "--ranks-per-node", "8")
    (tmp_path / "save" / "iter_0000040" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("40")
    status, printed, _ = said(*words)
    assert status == 0
    assert f"the job saves to {tmp_path / 'save'}, and resumes from there" in printed
    assert f"megatron-core: {patches.installed_version()}" in printed
