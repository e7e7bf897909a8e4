"""Test that a `--save` folder belongs to one run at a time: a new run takes it over only if the old one has ended."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_vp.errors import UserError
from megatron_vp.mcore.storage import save_folder
from megatron_vp.mcore.storage.save_folder import SaveFolder
from tests.harness import run_ranks, run_ranks_to_their_end, train
from tests.harness.disks import mounted
from tests.mcore.faults import Fault, few_steps, refusal, train_with_fault

FIRST = "in_use_1.json"
SECOND = "in_use_2.json"


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    """Claims are renewed and given up within a second; no job of SLURM."""
    monkeypatch.setattr(save_folder, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(save_folder, "SILENCE_SECONDS", 0.5)
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sleeper():
    """A process that lives until the test ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def folder():
    """Makes a run that wants the folder, and ends it with the test."""
    made: list[SaveFolder] = []

    def make(path: Path) -> SaveFolder:
        made.append(SaveFolder(path))
        return made[-1]

    yield make
    for each in made:
        each.release()


def claimed_by(path: Path, process: int, name: str = FIRST, **changes: str) -> Path:
    """A claim of another process of this machine, or of one that differs by `changes`."""
    started = save_folder._started(process)
    owner = save_folder._identity() | {"token": "other", "process": str(process), "started": str(started)}
    (path / name).write_text(json.dumps(owner | {"host": "node5"} | changes))
    return path / name


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def taken(run: SaveFolder, within: float = 5.0) -> float:
    """Seconds until the run has the folder."""
    begun = time.monotonic()
    while not run.take():
        assert time.monotonic() - begun < within
        time.sleep(0.02)
    return time.monotonic() - begun


def test_a_folder_is_claimed_and_released(tmp_path, folder):
    run = folder(tmp_path / "new" / "checkpoints")
    assert run.take() and names(tmp_path / "new" / "checkpoints") == [FIRST]
    assert run.check()
    run.release()
    assert names(tmp_path / "new" / "checkpoints") == []


def test_a_run_that_lives_is_named(tmp_path, folder, sleeper):
    claim = claimed_by(tmp_path, sleeper.pid, job="17 big", since="2026-01-01 10:00:00")
    os.utime(claim, (0, 0))  # however long ago
    with pytest.raises(UserError) as refused:
        folder(tmp_path).take()
    assert str(refused.value) == (
        f"--save {tmp_path} is in use by process {sleeper.pid} on node5 (SLURM job 17 big, since 2026-01-01 10:00:00), "
        f"and two runs would overwrite each other's checkpoints: wait until that run has ended, stop it, or use "
        f"another directory"
    )
    assert names(tmp_path) == [FIRST]


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_a_run_of_this_machine_that_was_killed_gives_way_at_once(tmp_path, folder, sleeper, reaped):
    claimed_by(tmp_path, sleeper.pid)
    sleeper.kill()
    if reaped:
        sleeper.wait()
    else:
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert folder(tmp_path).take() and names(tmp_path) == [SECOND]


def test_another_process_with_the_number_of_a_dead_one_keeps_nothing(tmp_path, folder, sleeper):
    claimed_by(tmp_path, sleeper.pid, started="1")
    assert folder(tmp_path).take()


def test_another_users_process_that_cannot_be_looked_at_is_watched(tmp_path, folder, sleeper, monkeypatch):
    """As under hidepid, where /proc shows a user's own processes only."""
    claimed_by(tmp_path, sleeper.pid)

    def hidden(_):
        raise PermissionError

    run = folder(tmp_path)
    monkeypatch.setattr(save_folder, "_started", hidden)
    assert not run.take() and 0.4 < taken(run) < 3


ELSEWHERE = [{"machine": "another"}, {"machine": ""}]


@pytest.mark.parametrize("place", ELSEWHERE, ids=["elsewhere", "unknown"])
def test_a_run_elsewhere_that_gives_no_sign_of_life_gives_way(tmp_path, folder, sleeper, capsys, place):
    claimed_by(tmp_path, sleeper.pid, **place)
    run = folder(tmp_path)
    assert 0.4 < taken(run) < 3
    assert names(tmp_path) == [SECOND]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "waiting up to 0.5 s to see whether that run is still alive" in said


@pytest.mark.parametrize("clock", [0, 1e10], ids=["its clock is late", "its clock is early"])
def test_a_run_elsewhere_that_lives_keeps_its_folder(tmp_path, folder, sleeper, clock):
    claim = claimed_by(tmp_path, sleeper.pid, machine="another")
    os.utime(claim, (clock, clock))
    run = folder(tmp_path)
    assert not run.take()
    os.utime(claim, (clock, clock + 1))
    with pytest.raises(UserError, match=r"in use by process .* on node5"):
        run.take()


def test_a_claim_is_renewed_as_long_as_its_run_lives(tmp_path, folder):
    run = folder(tmp_path)
    assert run.take()
    os.utime(tmp_path / FIRST, (0, 0))
    time.sleep(0.3)
    assert (tmp_path / FIRST).stat().st_mtime > 1e9


@pytest.mark.parametrize(
    ("before", "now", "at_once"),
    [
        (("17", "0"), ("17", "1"), True),
        (("17", "9"), ("17", "10"), True),
        (("17", "1"), ("17", "1"), False),
        (("17", "2"), ("17", "1"), False),
        (("16", "0"), ("17", "1"), False),
        (("", "0"), ("", "1"), False),
    ],
)
def test_a_requeued_attempt_of_a_job_takes_over_from_the_one_before(
    tmp_path, folder, sleeper, monkeypatch, before, now, at_once
):
    """Its first node may be lost, so no process can be looked for."""
    job, attempt = before
    claimed_by(tmp_path, sleeper.pid, machine="a lost node", job=job, attempt=attempt)
    monkeypatch.setenv("SLURM_JOB_ID", now[0])
    monkeypatch.setenv("SLURM_RESTART_COUNT", now[1])
    assert folder(tmp_path).take() == at_once


GARBAGE = {
    "empty": b"",
    "no text": b"\xff\xfe",
    "no mapping": b"[1]",
    "deep": b"[" * 100_000,
    "long": b'{"process": ' + b"9" * 10_000 + b"}",
    "control characters": b'{"process": "\\u001b[2J\\nrank 9: error: forged", "host": "' + b"h" * 10_000 + b'"}',
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_claim_that_says_nothing_is_watched(tmp_path, folder, capsys, what):
    (tmp_path / FIRST).write_bytes(GARBAGE[what])
    run = folder(tmp_path)
    assert not run.take()
    os.utime(tmp_path / FIRST, (0, 0))
    with pytest.raises(UserError) as refused:
        run.take()
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    assert capsys.readouterr().err.count("\n") == 1
    assert 0.4 < taken(folder(tmp_path)) < 3


def test_a_link_that_was_planted_is_not_followed(tmp_path, folder):
    (tmp_path / "victim").write_text("precious")
    for name in (FIRST, SECOND):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    assert taken(folder(tmp_path)) < 3
    assert (tmp_path / "victim").read_text() == "precious" and names(tmp_path) == ["in_use_3.json", "victim"]


def test_a_folder_that_takes_no_files_is_one_line(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to --save .*/file: File exists; choose a writable directory"):
        folder(tmp_path / "file").take()
    with mounted(tmp_path / "disk", "nr_inodes=1") as disk, pytest.raises(UserError, match="No space left on device"):
        folder(disk).take()


def race(_rank, _world_size, path, begin):
    """Whether this process has got the folder."""
    run = SaveFolder(Path(path))
    time.sleep(max(0.0, begin - time.time()))
    for _ in range(200):
        try:
            if run.take():
                time.sleep(1)
                return True
        except UserError:
            return False
        time.sleep(0.01)
    raise AssertionError("never decided")


@pytest.mark.parametrize("abandoned", [0, 1, 3])
def test_of_runs_that_start_together_one_gets_the_folder(tmp_path, sleeper, abandoned):
    for number in range(1, abandoned + 1):
        claimed_by(tmp_path, sleeper.pid, f"in_use_{number}.json")
    sleeper.kill()
    sleeper.wait()
    results = run_ranks(6, race, str(tmp_path), time.time() + 3)
    assert sum(results) == 1
    assert names(tmp_path) == [f"in_use_{abandoned + 1}.json"]


def test_a_claim_whose_number_was_overtaken_is_taken_back(tmp_path, folder, sleeper):
    """Another run took over and ended, and a third began with 1 again, while this one was about to write."""
    run = folder(tmp_path)
    void = [tmp_path / SECOND]
    claimed_by(tmp_path, sleeper.pid)
    assert not run._create(void) and names(tmp_path) == [FIRST]


def test_a_run_that_has_lost_its_folder_saves_nothing_more(tmp_path, folder, sleeper):
    run = folder(tmp_path)
    assert run.take()
    (tmp_path / FIRST).unlink()
    claimed_by(tmp_path, sleeper.pid, SECOND)
    with pytest.raises(UserError, match=r"was taken over by process .* on node5 .* this run stops without saving"):
        run.check()
    run.release()
    assert names(tmp_path) == [SECOND]


def test_a_claim_that_somebody_removed_is_made_again(tmp_path, folder):
    run = folder(tmp_path)
    assert run.take()
    (tmp_path / FIRST).unlink()
    assert run.check() and names(tmp_path) == [FIRST]
    os.utime(tmp_path / FIRST, (0, 0))
    time.sleep(0.3)
    assert (tmp_path / FIRST).stat().st_mtime > 1e9
    run.release()
    assert names(tmp_path) == []


def wait_for(path: str) -> None:
    """A rank that is busy until a file appears."""
    while not Path(path).exists():
        time.sleep(0.1)


def replace_claim(path: str) -> None:
    """What a run would find that was suspended while another took its folder."""
    for claim in Path(path).glob("in_use_*"):
        claim.unlink()
    (Path(path) / "in_use_7.json").touch()


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
        assert checkpoints / FIRST in before
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
    stolen = Fault(functools.partial(replace_claim, str(tmp_path)), 0, "F")
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(save=tmp_path, **SAVING), stolen)
    assert refusal(ends).startswith(f"--save {tmp_path} was taken over by an unknown run")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not (tmp_path / "iter_0000004").exists()


def test_a_conversion_leaves_the_folder_of_a_run_as_it_is(tmp_path):
    """Megatron writes it to a folder below the one that is named."""
    saved, converted = tmp_path / "saved", tmp_path / "torch_dist"
    assert [end for end, _ in run_ranks_to_their_end(2, train_with_fault, few_steps(save=saved, **SAVING))] == [0, 0]
    converted.mkdir()
    claim = claimed_by(converted, os.getpid())
    conversion = {"ckpt_convert_format": "torch_dist", "ckpt_convert_save": tmp_path}
    converting = few_steps(load=saved, **SAVING, **conversion)
    refused = run_ranks_to_their_end(2, train_with_fault, converting)
    assert refusal(refused).startswith(f"--ckpt-convert-save {converted} is in use by process ")
    assert names(converted) == [claim.name]
    claim.unlink()
    assert [end for end, _ in run_ranks_to_their_end(2, train_with_fault, converting)] == [0, 0]
    assert (converted / "latest_checkpointed_iteration.txt").read_text() == "8"


def test_an_evaluation_needs_no_folder_of_its_own(tmp_path):
    claim = claimed_by(tmp_path, os.getpid())
    evaluating = few_steps(save=tmp_path, save_interval=2, skip_train=True, eval_iters=1)
    assert [status for status, _ in run_ranks_to_their_end(2, train_with_fault, evaluating)] == [0, 0]
    assert names(tmp_path) == [claim.name, "resolved_config.yaml"]
