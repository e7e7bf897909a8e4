"""Test training on a disk of 50 MB that becomes full: the last complete checkpoint survives, and runs can continue."""

from __future__ import annotations

import shutil

import pytest

from tests.harness import run_ranks_to_their_end, train
from tests.harness.disks import fill, mounted
from tests.mcore.faults import errors, few_steps, train_with_fault

TRACKER = "latest_checkpointed_iteration.txt"
ASYNCHRONOUS = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
MODEL = {"vocab_size": 8191, "hidden_size": 64, "train_iters": 6}
"""A checkpoint of it takes 15 MB: three of them fit."""


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own of 50 MB."""
    with mounted(tmp_path / "disk") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [{}, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_a_disk_that_fills_up_in_a_save_leaves_the_last_whole_checkpoint(small_disk, asynchronous):
    folder = small_disk / "checkpoints"
    saving = {**MODEL, "save": folder, "load": folder, "save_interval": 1}
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(**saving, **asynchronous))
    assert [status for status, _ in ends] == [1, 1]
    for _, output in ends:
        assert len(errors(output)) == 1 and "Traceback" not in output, output
    last = int((folder / TRACKER).read_text())
    # Asynchronously the next save is on its way before this one is whole.
    assert last == 3 or (asynchronous and last == 2)
    whole = train(2, few_steps(**MODEL), same_weights=False)
    # Old checkpoints make room; what the last save has left behind stays, and is written over.
    for step in range(1, last):
        shutil.rmtree(folder / f"iter_{step:07d}")
    rest = train(2, few_steps(**saving, exit_interval=last + 2), same_weights=False)
    assert rest.losses == whole.losses[last : last + 2]
    assert (folder / TRACKER).read_text() == str(last + 2)


WITHOUT = "rank {}: warning: cannot write {}: No space left on device; the run continues without"


def test_reports_that_find_no_room_do_not_end_the_run(small_disk, tmp_path):
    folders = {name: small_disk / name for name in ("rank_report", "pipeline_trace")}
    fill(small_disk)
    saving = {"save": tmp_path / "checkpoints", "save_interval": 5}
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(**folders, **saving))
    assert [status for status, _ in ends] == [0, 0]
    for rank, (_, output) in enumerate(ends):
        said = [
            output.count(WITHOUT.format(rank, f"{what} {folders[option]}/rank_{rank}.json"))
            for what, option in (("the rank report", "rank_report"), ("the pass trace", "pipeline_trace"))
        ]
        assert said == [1, 1] and "Traceback" not in output, output
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == "5"
    assert not any(path.is_file() and path.stat().st_size for name in folders for path in folders[name].iterdir())
