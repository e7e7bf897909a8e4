"""Test saves that a rank's death or a full disk interrupts: the previous checkpoint remains the last one."""

from __future__ import annotations

import filecmp
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.harness import run_ranks_to_their_end, train
from tests.mcore.faults import die, errors, few_steps, train_with_fault

ASYNCHRONOUS = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
TRACKER = "latest_checkpointed_iteration.txt"
STEP = "iter_{:07d}"


def train_and_die_in_a_save(rank, _world_size, arguments, faulty_rank):
    """Train as the script does; the rank dies in its second save: over its file, or beside the process that writes."""
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    script.prepare()
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import checkpointing, get_args
    from megatron.training.async_utils import maybe_finalize_async_save

    def second_save():
        return rank == faulty_rank and get_args().curr_iteration == 3

    schedule, write = checkpointing.schedule_async_save, FileSystemWriterAsync.write_preloaded_data_multithread

    def schedule_and_die(request):
        if get_args().curr_iteration == 3:  # The first save ends first, however slowly its process has started.
            maybe_finalize_async_save(blocking=True)
        schedule(request)
        if second_save():
            die()

    def write_half(transforms, use_msc, writer, buckets, results):
        if second_save():
            Path(buckets[0][0]).write_bytes(b"half a file")
            die()
        write(transforms, use_msc, writer, buckets, results)

    fault = (
        mock.patch.object(checkpointing, "schedule_async_save", schedule_and_die)
        if "--async-save" in arguments
        else mock.patch.object(FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(write_half))
    )
    with fault, script.one_line_errors():
        script.main()


@pytest.mark.parametrize(
    "asynchronous",
    [{}, pytest.param(ASYNCHRONOUS, marks=pytest.mark.slow)],
    ids=["synchronous", "asynchronous"],
)
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before_and_the_run_goes_on_from_it(tmp_path, asynchronous):
    saving = {"train_iters": 6, "save": tmp_path, "save_interval": 2, **asynchronous}
    ends = run_ranks_to_their_end(2, train_and_die_in_a_save, few_steps(**saving), 1)
    assert [status for status, _ in ends] == [1, -signal.SIGKILL]
    assert any(line.startswith("rank 0 was waiting ") for line in errors(ends[0][1])), ends[0][1]
    assert (tmp_path / TRACKER).read_text() == "2"
    whole = train(2, few_steps(train_iters=6), same_weights=False)
    rest = train(2, few_steps(**saving, load=tmp_path), same_weights=False)
    assert rest.losses == whole.losses[2:]
    # It saved over what the rank left behind.
    again = few_steps(train_iters=6, load=tmp_path, ckpt_step=4)
    assert train(2, again, same_weights=False).losses == rest.losses[2:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a checkpoint at iteration 2."""
    folder = tmp_path_factory.mktemp("saved")
    train(2, few_steps(save=folder, save_interval=2, exit_interval=2), same_weights=False)
    return folder


GAVE_UP = [
    "rank 0 abandoned the checkpoint, because the write step failed on rank 1: ",
    "rank 1 abandoned the checkpoint, because the write step failed; the message of rank 0 names the rank that failed",
]
FULL = {
    "a rank's file": ("{step}/__1_0.distcp", {}, GAVE_UP),
    "a rank's file, asynchronous": ("{step}/__1_0.distcp", ASYNCHRONOUS, GAVE_UP),
    "the mark of a whole checkpoint": (
        "{step}/metadata.json",
        {},
        ["No space left on device", "rank 1 was waiting in"],
    ),
    "the tracker": (f"{TRACKER}.partial", {}, ["No space left on device", "rank 1 was waiting in"]),
}
DEFAULT = "a rank's file", "the tracker"


@pytest.mark.parametrize(
    "full", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in FULL]
)
def test_a_disk_that_is_full_leaves_the_checkpoint_before(saved, tmp_path, full):
    file, asynchronous, said = FULL[full]
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    (folder / STEP.format(4)).mkdir()
    (folder / file.format(step=STEP.format(4))).symlink_to("/dev/full")
    arguments = few_steps(save=folder, load=folder, save_interval=4, **asynchronous)
    ends = run_ranks_to_their_end(2, train_with_fault, arguments)
    assert [status for status, _ in ends] == [1, 1]
    for rank, (_, output) in enumerate(ends):
        lines = errors(output)
        assert len(lines) == 1 and said[rank] in lines[0] and "Traceback" not in output, output
    assert (folder / TRACKER).read_text() == "2"
    compared = filecmp.dircmp(saved / STEP.format(2), folder / STEP.format(2))
    assert compared.same_files and not (compared.diff_files or compared.left_only or compared.right_only)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_leaves_the_checkpoint_before(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    (folder / STEP.format(4)).write_text("in the way")
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(save=folder, load=folder, save_interval=4))
    assert [status for status, _ in ends] == [1, 1]
    said = [f"File exists: {folder / STEP.format(4)}", "rank 1 was waiting in"]
    for rank, (_, output) in enumerate(ends):
        (line,) = errors(output)
        assert said[rank] in line and "<frozen" not in line and "Traceback" not in output, output
    assert (folder / TRACKER).read_text() == "2"


def test_reports_that_one_rank_cannot_write_do_not_end_the_run(tmp_path):
    folders = {"rank_report": tmp_path / "report", "pipeline_trace": tmp_path / "trace"}
    for folder in folders.values():
        (folder / "rank_1.json").mkdir(parents=True)
    ends = run_ranks_to_their_end(2, train_with_fault, few_steps(**folders))
    assert [status for status, _ in ends] == [0, 0]
    for what, folder in (("the rank report", folders["rank_report"]), ("the pass trace", folders["pipeline_trace"])):
        line = (
            f"rank 1: warning: cannot write {what} {folder}/rank_1.json: Is a directory; the run continues without it"
        )
        assert [output.count(line) for _, output in ends] == [0, 1]
        assert [path.name for path in sorted(folder.iterdir())] == ["rank_0.json", "rank_1.json"]


def replace_the_tracker(_rank, _world_size, folder):
    """Die with the new tracker half written."""
    import pretrain_gpt_vp as script

    script.prepare()
    from megatron.training import checkpointing

    with checkpointing.maybe_msc.open(f"{folder}/{TRACKER}", "w") as file:
        file.write("4")
        file.flush()
        die()


def test_a_rank_that_dies_while_it_names_the_last_checkpoint_leaves_the_name_before(tmp_path):
    (tmp_path / TRACKER).write_text("2")
    assert run_ranks_to_their_end(1, replace_the_tracker, tmp_path)[0][0] == -signal.SIGKILL
    assert (tmp_path / TRACKER).read_text() == "2"
