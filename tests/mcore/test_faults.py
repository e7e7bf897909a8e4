"""Ranks that die, stall or fail in the middle of a schedule: every other rank ends, and says where it waited."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.harness import run_ranks_to_their_end, train
from tests.harness.training import tiny_model

RANKS = 3
LIMIT = 5
WAITED = r"^error: rank {rank} (waited|was) .* microbatch \d+.*"


def train_with_fault(rank, _world_size, arguments, fault, faulty_rank, where):
    """Train as the script does, with a fault on one rank in microbatch 2 of the third iteration."""
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    script.prepare()
    from megatron.training import get_args

    from megatron_vp.mcore.driver import MegatronModel

    def faulty(original):
        def method(self, *args):
            microbatch = args[1] if where == "F" else args[0]
            strikes = rank == faulty_rank and microbatch == 2 and get_args().curr_iteration == 2
            change = fault() if strikes else None
            if change and where == "F":
                handle = self._chunks[0].core.register_forward_hook(lambda _module, _inputs, output: change(output))
                result = original(self, *args)
                handle.remove()
                return result
            result = original(self, *args)
            return change(result) if change else result

        return method

    name = {"F": "forward", "tokens": "tokens", "labels": "labels"}[where]
    with (
        mock.patch.object(MegatronModel, name, faulty(getattr(MegatronModel, name))),
        script.one_line_errors(),
    ):
        try:
            script.main()
        except SystemExit as stop:
            os._exit(stop.code or 0)


def train_and_die_in_a_save(rank, _world_size, arguments, faulty_rank):
    """Train as the script does; the rank dies in its second save: over its file, or beside the process that writes."""
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *arguments]
    script.prepare()
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import checkpointing, get_args

    def second_save():
        return rank == faulty_rank and get_args().curr_iteration == 3

    schedule, write = checkpointing.schedule_async_save, FileSystemWriterAsync.write_preloaded_data_multithread

    def schedule_and_die(request):
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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang():
    time.sleep(1000)


def fail():
    raise RuntimeError("a defect")


def to_nan():
    return lambda output: output * float("nan")


def to_a_large_id():
    return lambda ids: ids.fill_(512)


def _arguments(**changes):
    return tiny_model(
        **{
            "pipeline_model_parallel_size": RANKS,
            "num_layers": 3,
            "vocab_parallel": True,
            "train_iters": 5,
            "distributed_timeout_seconds_after_init": LIMIT,
            **changes,
        }
    )


def _said(output, rank):
    lines = [line for line in output.splitlines() if re.match(WAITED.format(rank=rank), line)]
    assert lines, f"rank {rank} did not say where it was:\n{output}"
    return lines[-1]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("v-half", marks=pytest.mark.slow)])
def test_when_a_rank_is_killed_the_others_say_where_they_waited(schedule):
    ends = run_ranks_to_their_end(RANKS, train_with_fault, _arguments(pipeline_schedule=schedule), die, 1, "F")
    assert [status for status, _ in ends] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert _said(ends[rank][1], rank) and "Traceback" not in ends[rank][1]


@pytest.mark.parametrize(
    "asynchronous",
    [
        {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"},
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=["asynchronous", "synchronous"],
)
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before_and_the_run_goes_on_from_it(tmp_path, asynchronous):
    saving = {"train_iters": 6, "save": tmp_path, "save_interval": 2, **asynchronous}
    ends = run_ranks_to_their_end(RANKS, train_and_die_in_a_save, _arguments(**saving), 1)
    assert [status for status, _ in ends] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert re.search(f"^error: rank {rank} waited ", ends[rank][1], re.M), ends[rank][1]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    whole = train(RANKS, _arguments(train_iters=6), same_weights=False)
    rest = train(RANKS, _arguments(**saving, load=tmp_path), same_weights=False)
    # It saves over what the rank left behind.
    assert rest.losses == whole.losses[2:]
    assert (
        train(RANKS, _arguments(train_iters=6, load=tmp_path, ckpt_step=4), same_weights=False).losses
        == rest.losses[2:]
    )


def test_a_stopped_rank_is_named_by_the_others():
    ends = run_ranks_to_their_end(RANKS, train_with_fault, _arguments(), stop, 1, "F", stopped=1)
    assert [status for status, _ in ends] == [1, None, 1]
    lines = [_said(ends[rank][1], rank) for rank in (0, 2)]
    # The first to end may take the other's connections along before it has spoken for itself.
    assert any(line.endswith("s); rank 1 does not answer") for line in lines), lines


def test_a_rank_whose_data_hangs_says_so():
    ends = run_ranks_to_their_end(RANKS, train_with_fault, _arguments(), hang, 0, "tokens")
    assert [status for status, _ in ends] == [1, 1, 1]
    culprit = "rank 0 was at the data of microbatch 2"
    assert f"{culprit} ({LIMIT} s)" in _said(ends[0][1], 0)
    assert all(_said(ends[rank][1], rank).endswith(f"; {culprit}") for rank in (1, 2))


def test_a_defect_keeps_its_traceback_and_ends_all_ranks():
    ends = run_ranks_to_their_end(RANKS, train_with_fault, _arguments(), fail, 1, "F")
    assert [status for status, _ in ends] == [1, 1, 1]
    said = ends[1][1]
    assert "Traceback" in said and re.search(r"RuntimeError: a defect\n.*rank 1 was in F of microbatch 2", said)


@pytest.mark.parametrize(
    ("fault", "rank", "where", "said"),
    [
        pytest.param(
            *(to_a_large_id, 0, "tokens", "token id 512 is outside the vocabulary of 512"), marks=pytest.mark.slow
        ),
        (to_a_large_id, 2, "labels", "label 512 of microbatch 2 is outside the vocabulary of 512"),
    ],
)
def test_an_id_outside_the_vocabulary_is_named(fault, rank, where, said):
    ends = run_ranks_to_their_end(RANKS, train_with_fault, _arguments(), fault, rank, where)
    assert all(status in (1, 2) for status, _ in ends) and ends[rank][0] == 2
    assert f"rank {rank}: error: {said}" in ends[rank][1] and "Traceback" not in ends[rank][1]


def test_nan_is_reported_with_rank_and_microbatch_and_where_it_was_born(tmp_path):
    arguments = _arguments(save=tmp_path, save_interval=10)
    ends = run_ranks_to_their_end(RANKS, train_with_fault, arguments, to_nan, 1, "F")
    # Megatron runs the iteration again, saves a checkpoint, and asks to be started on other devices.
    assert [status for status, _ in ends] == [16, 16, 16]
    assert "rank 2: the loss of microbatch 2 is NaN or infinite" in ends[2][1]
    assert "rank 1: F of microbatch 2 in chunk 0 made NaN or infinity" in ends[1][1]
