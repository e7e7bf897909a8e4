"""Test that a rank that prints an error line ends with its exit status, even if it cannot print."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_vp.errors import PeerLost, UserError, at_last, say
from megatron_vp.mcore.start.launch import one_line_errors
from megatron_vp.mcore.storage.attempt import noting_the_end
from tests.harness.broken import BROKEN, break_stderr
from tests.harness.ranks import run_ranks, run_ranks_to_their_end
from tests.harness.training import tiny_model


def end_with(rank: int, world: int, error: BaseException, connected: bool, stderr: str | None) -> None:
    """Raise `error` where a training script would."""
    if connected:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # nobody else has a line to print
    print("a line of the log, not yet written")
    break_stderr(stderr)
    try:
        with one_line_errors():
            raise error
    except SystemExit as end:
        os._exit(end.code)


ERRORS = [
    (UserError("bad input"), False, 2, "error: bad input"),
    (UserError("bad input"), True, 2, "error: bad input"),
    (OSError(36, "File name too long", "log"), False, 2, "error: File name too long: log (in end_with ("),
    (PeerLost("rank 0 waited"), True, 1, "error: rank 0 waited"),
    (OSError(28, "No space left on device", "log"), True, 1, "No space left on device: log"),
    (ZeroDivisionError("a defect"), True, 1, "ZeroDivisionError: a defect"),
]


def end_alone(_rank: int, _world: int) -> None:
    """End a replay of rank 3 of 8, whose peers do not exist."""
    from megatron_vp.mcore.settled import process

    os.environ.update(RANK="3", WORLD_SIZE="8")
    with mock.patch.object(process, "replayed", {"num_layers": 1}):
        end_with(3, 8, UserError("bad input"), False, None)


def test_the_line_of_a_rank_that_is_replayed_is_printed():
    [(ended, output)] = run_ranks_to_their_end(1, end_alone, timeout=30)
    assert ended == 2 and "\nerror: bad input" in output


@pytest.mark.parametrize(("error", "connected", "status", "said"), ERRORS)
def test_the_line_is_printed(error, connected, status, said):
    [(ended, output)] = run_ranks_to_their_end(1, end_with, error, connected, None, timeout=30)
    assert ended == status and said in output
    assert "a line of the log" in output and ("Traceback" in output) == (said == "ZeroDivisionError: a defect")


def end_normally(rank: int, world: int, stop: BaseException | None) -> bool:
    """Whether a script's end leaves process groups behind, whose threads could outlive the interpreter."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.new_group()
    with suppress(SystemExit), one_line_errors():
        if stop is not None:
            raise stop
    return dist.is_initialized()


@pytest.mark.parametrize("stop", [None, SystemExit(0)])
def test_a_run_that_ends_leaves_no_process_group(stop):
    assert run_ranks(2, end_normally, stop, timeout=30) == [False, False]


def end_in_pretrain(rank: int, world: int, error: BaseException, trains: bool, folder: str) -> None:
    """Raise `error` inside Megatron's `pretrain`, before or after training has begun."""
    from megatron.training import global_vars

    def pretrain() -> None:
        raise error

    os.environ["MEGATRON_VP_ATTEMPT"] = folder
    dist.init_process_group("gloo", rank=rank, world_size=world)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # nobody else has a line to print
    global_vars._GLOBAL_ARGS = SimpleNamespace(**{"curr_iteration": 0} if trains else {})
    try:
        with one_line_errors(), noting_the_end():
            pretrain()
    except SystemExit as end:
        os._exit(end.code)


@pytest.mark.parametrize(
    ("error", "trains", "status", "marks", "said"),
    [
        (
            ValueError("tokenizer_type None"),
            False,
            2,
            {"trusted"},
            "error: ValueError: tokenizer_type None (in pretrain (",
        ),
        (AssertionError(), False, 2, {"trusted"}, "error: AssertionError: raise error (in pretrain ("),
        (TypeError("not NoneType"), False, 2, {"trusted"}, "error: TypeError: not NoneType (in pretrain ("),
        (FileNotFoundError(2, "No such file", "x"), False, 2, {"trusted"}, "error: No such file: x (in pretrain ("),
        (ValueError("a wrong batch"), True, 1, {"retry", "trusted"}, "Traceback"),
        (RuntimeError("CUDA error: uncorrectable ECC error"), False, 1, {"retry", "trusted"}, "Traceback"),
        (dist.DistNetworkError("timed out"), False, 1, {"retry", "trusted"}, "timed out"),
        (MemoryError(), False, 1, {"retry", "trusted"}, "Traceback"),
        (SystemExit(17), True, 17, {"retry"}, ""),
    ],
    ids=str,
)
def test_what_ends_before_training_has_status_2_unless_a_machine_may_be_the_cause(
    tmp_path, error, trains, status, marks, said
):
    for mark in ("retry", "trusted"):
        (tmp_path / mark).touch()
    [(ended, output)] = run_ranks_to_their_end(1, end_in_pretrain, error, trains, str(tmp_path), timeout=60)
    assert ended == status and said in output, output
    assert {path.name for path in tmp_path.iterdir()} == marks
    assert ("Traceback" in output) == (said == "Traceback" or isinstance(error, TypeError)), output


@pytest.mark.parametrize("stderr", BROKEN)
@pytest.mark.parametrize(("error", "connected", "status", "said"), ERRORS[1:2])  # a refusal
def test_a_line_that_cannot_be_printed_changes_no_status(error, connected, status, said, stderr):
    [(ended, output)] = run_ranks_to_their_end(1, end_with, error, connected, stderr, timeout=30)
    assert ended == status and said not in output
    assert "a line of the log" in output


def train_until_interrupted(rank, _world_size, words, after):
    """Training under the plug-in that gets Ctrl-C `after` so many iterations."""
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *words]
    # A shell starts background commands deaf to it, and with them all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script.prepare()
    from megatron.training import training

    log = training.training_log

    def training_log(*args, **kwargs):
        if args[3] == after:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        return log(*args, **kwargs)

    training.training_log = training_log
    with script.one_line_errors():
        script.main()


def test_ctrl_c_is_one_line_and_no_traceback(tmp_path):
    saved = {"save": str(tmp_path), "save_interval": 1000}
    words = tiny_model(pipeline_model_parallel_size=2, vocab_parallel=True, train_iters=1000, **saved)
    ends = run_ranks_to_their_end(2, _exiting, words, 2, timeout=60)
    assert [status for status, _ in ends] == [130, 130]
    outputs = [output for _, output in ends]
    assert [output.count("stopped by Ctrl-C (SIGINT)") for output in outputs] == [1, 0]
    assert not any("Traceback" in output or "error: " in output for output in outputs), outputs


def _exiting(rank, world_size, *args):
    try:
        train_until_interrupted(rank, world_size, *args)
    except SystemExit as end:
        os._exit(end.code)


def test_a_line_is_printed_where_no_thread_can_be_started(monkeypatch, capsys):
    def no_room(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    assert at_last(lambda: say("error: bad input"))
    assert capsys.readouterr().err == "error: bad input\n"
