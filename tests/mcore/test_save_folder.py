"""Test that a `--save` folder belongs to one run at a time: a new run takes it over only if the old one has ended."""

from __future__ import annotations

import argparse
import errno
import fcntl
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_vp.errors import UserError
from megatron_vp.files import warn_once
from megatron_vp.mcore.storage import save_folder
from megatron_vp.mcore.storage.save_folder import LOCK, SaveFolder, saves_to
from tests.harness import run_ranks_to_their_end, train
from tests.harness.disks import mounted
from tests.mcore.faults import Fault, few_steps, refusal, train_with_fault

HOLDS = """
import os, pathlib, sys, time
from megatron_vp.mcore.storage.save_folder import SaveFolder
folder = SaveFolder(pathlib.Path(sys.argv[1]))
folder.take()
(pathlib.Path(sys.argv[1]) / "megatron_vp.lock").read_text()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
input()
"""
"""A run that takes a folder, opens and closes the lock's file again, and has a child that it has forked."""


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """No job of SLURM."""
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def taken(path: Path) -> SaveFolder:
    """The folder, locked as by a run of its own: a lock belongs to an open file, not to a process."""
    folder = SaveFolder(path)
    folder.take()
    return folder


def test_a_run_that_lives_is_named_and_one_that_was_killed_gives_way_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    command = [sys.executable, "-c", HOLDS, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        monkeypatch.delenv("SLURM_JOB_ID")
        try:
            for _ in range(2):
                with pytest.raises(UserError) as refused:
                    SaveFolder(tmp_path).take()
            assert re.fullmatch(
                rf"--save {tmp_path} is in use by process {process.pid} on \S+ \(SLURM job 17 big, attempt 0, since "
                rf"[\d-]+ [\d:]+\), and two runs would overwrite each other's checkpoints: wait until that run has "
                rf"ended, stop it, or use another directory",
                str(refused.value),
            )
            process.kill()
            process.wait()
            taken(tmp_path).release()
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("before", "now", "at_once"),
    [
        (("17", "0"), ("17", "1"), True),
        (("17", "9"), ("17", "10"), True),
        (("17", "1"), ("17", "1"), False),
        (("17", "2"), ("17", "1"), False),
        (("16", "0"), ("17", "1"), False),
        (None, ("17", "1"), False),
    ],
)
def test_a_requeued_attempt_of_a_job_takes_over_from_the_one_before(tmp_path, monkeypatch, before, now, at_once):
    """A file server may not have noticed yet that the node of the attempt before is lost."""

    def attempt_of(job):
        for name, value in zip(("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), job or (), strict=False):
            monkeypatch.setenv(name, value)

    attempt_of(before)
    first = taken(tmp_path)
    attempt_of(now)
    second = SaveFolder(tmp_path)
    if at_once:
        second.take()
        with pytest.raises(UserError, match=f"is in use by .* attempt {now[1]}"):
            first.check()
    else:
        with pytest.raises(UserError, match="is in use by"):
            second.take()
    first.release()
    second.release()


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"\x1b[2J\nrank 9: error: forged" + b"h" * 10_000])
def test_a_file_that_does_not_name_its_run_is_one_line(tmp_path, text):
    run = taken(tmp_path)
    (tmp_path / LOCK).write_bytes(text)
    with pytest.raises(UserError) as refused:
        SaveFolder(tmp_path).take()
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    run.release()


def test_a_link_that_was_planted_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="cannot write to --save"):
        SaveFolder(tmp_path).take()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_folder_that_takes_no_files_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to --save .*/file: File exists; choose a writable directory"):
        SaveFolder(tmp_path / "file").take()
    with mounted(tmp_path / "disk", "nr_inodes=1") as disk, pytest.raises(UserError, match="No space left on device"):
        SaveFolder(disk).take()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_one_line_says_that_nothing_is_guarded(tmp_path, monkeypatch, capsys, code):
    def flock(*_):
        raise OSError(code, "no locks")

    warn_once.cache_clear()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(fcntl, "flock", flock)
    run = taken(tmp_path)
    run.check()
    run.release()
    said = f"warning: --save {tmp_path} is on a file system without locks, so this run cannot notice another run"
    assert capsys.readouterr().err == f"{said} that saves there too\n"


def test_object_storage_is_not_guarded_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    save_folder.claim("--save", "msc://bucket/run")
    assert "--save msc://bucket/run is object storage, which has no locks, so" in capsys.readouterr().err


def test_the_folder_that_a_run_saves_to():
    """Megatron writes a conversion to a folder below the one that is named. An evaluation needs no folder."""
    args = argparse.Namespace(save="a", skip_train=False, ckpt_convert_format=None, ckpt_convert_save=None)
    assert saves_to(args) == ("--save", "a")
    args.skip_train = True
    assert saves_to(args) is None
    args.ckpt_convert_format, args.ckpt_convert_save = "torch_dist", "b"
    assert saves_to(args) == ("--ckpt-convert-save", "b/torch_dist")


def wait_for(path: str) -> None:
    """A rank that is busy until a file appears."""
    while not Path(path).exists():
        time.sleep(0.1)


def take_over(path: str) -> None:
    """What a run would find that was suspended while another took its folder."""
    (Path(path) / LOCK).unlink()
    take_over.run = taken(Path(path))


SAVING = {"save_interval": 2, "train_iters": 8, "distributed_timeout_seconds_after_init": None}


def test_a_second_run_is_refused_and_leaves_the_folder_of_the_first_as_it_is(tmp_path):
    checkpoints, go_on = tmp_path / "checkpoints", tmp_path / "go on"
    saving = few_steps(save=checkpoints, load=checkpoints, exit_interval=6, **SAVING)
    ends = []
    busy = Fault(functools.partial(wait_for, str(go_on)), 0, "F")
    first = threading.Thread(target=lambda: ends.extend(run_ranks_to_their_end(2, train_with_fault, saving, busy)))
    first.start()
    try:
        deadline = time.monotonic() + 100
        while not (checkpoints / "latest_checkpointed_iteration.txt").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
        assert checkpoints / LOCK in before
        refused = run_ranks_to_their_end(2, train_with_fault, [*saving, "--seed", "7"])
        assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before
    finally:
        go_on.touch()
        first.join()
    assert refusal(refused).startswith(f"--save {checkpoints} is in use by process ")
    assert [status for status, _ in ends] == [0, 0], ends
    rest = train(2, few_steps(save=checkpoints, load=checkpoints, **SAVING), same_weights=False)
    whole = train(2, few_steps(train_iters=8), same_weights=False)
    assert rest.losses == whole.losses[6:]


def test_a_run_whose_folder_was_taken_over_ends_without_saving(tmp_path):
    stolen = Fault(functools.partial(take_over, str(tmp_path)), 0, "F")
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(save=tmp_path, **SAVING), stolen)
    assert refusal(ends).startswith(f"--save {tmp_path} is in use by process ")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not (tmp_path / "iter_0000004").exists()
