"""Test that a process blocked in a backend, where no Python signal handler runs, prints where it is and ends.

It must end whatever else fails: its standard error, the store, foreign values in the store, or its children.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_vp.errors import printable
from megatron_vp.runtime.progress import Progress
from megatron_vp.runtime.watchdog import Watchdog
from megatron_vp.schedule.instructions import Wait
from megatron_vp.schedule.transfers import Channel, Message
from tests.harness.broken import BROKEN, alive, break_stderr
from tests.harness.ranks import run_ranks_to_their_end

MEMBERS = (4, 5, 6)
WAIT = Wait(Message(Channel.GRADIENT, 7, 2, 1, 2, 1))
WAITED = "error: rank 5 waited for B of microbatch 7 from rank 6"
TOLD = " when it received SIGTERM"
SPOKEN = ((4, b"rank 4 waited for C1"), (6, b"rank 6 waited for C1"))
"""Words of the other ranks, without which the roll call takes four seconds."""


class AskedByTheMainThread:
    """A mark that a driver in trouble would never answer for: whoever asks from another thread gives the rank away."""

    def done(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            os._exit(99)
        return False


def wait_in_a_backend(
    _rank: int,
    _world: int,
    limit: float,
    told: int | None = None,
    stderr: str | None = None,
    store: tuple[str, int] | None = None,
    words: tuple[tuple[int, bytes], ...] = SPOKEN,
    child: str | None = None,
) -> None:
    """Stall in code that no signal interrupts, in the third iteration.

    Args:
        limit: the watchdog's, in seconds.
        told: a signal that comes a moment later.
        stderr: what is wrong with it.
        store: an address in place of the launcher's.
        words: what lies in the store, by rank.
        child: a file for the number of a process that this rank starts.
    """
    if store is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store[0], str(store[1])
    elif words:
        there = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        for rank, said in words:
            there.set(f"megatron_vp/stalled/0/{rank}", said)
    if child is not None:
        multiprocessing.Process(target=_work_on, args=(Path(child),), daemon=True).start()
        while not Path(child).exists():
            time.sleep(0.01)
    progress = Progress(MEMBERS, 1)
    progress.iteration = 3
    progress.at(WAIT)
    progress.mark(WAIT, AskedByTheMainThread())
    Watchdog(progress, 100, limit).start()
    break_stderr(stderr)
    if told:
        threading.Timer(0.5, os.kill, (os.getpid(), told)).start()
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _work_on(file: Path) -> None:
    os.setsid()  # out of reach of the harness, which ends what a rank leaves behind
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(60)


@pytest.fixture(scope="module")
def black_hole():
    """The address of a store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@pytest.mark.parametrize(
    ("limit", "told", "status", "said"),
    [
        (100, signal.SIGTERM, 143, TOLD),
        (0.5, None, 1, r" \(\d s\)"),
    ],
)
def test_a_waiting_process_says_for_what_and_ends(limit, told, status, said):
    [(ended, output)] = run_ranks_to_their_end(1, wait_in_a_backend, limit, told, timeout=30)
    assert ended == status
    assert re.fullmatch(f"{WAITED}{said}", output.strip())


@pytest.mark.parametrize(
    ("limit", "told", "status", "stderr"),
    [*((0.5, None, 1, how) for how in BROKEN), (100, signal.SIGTERM, 143, "nobody reads")],
)
def test_it_ends_although_its_line_cannot_be_written(limit, told, status, stderr):
    [(ended, output)] = run_ranks_to_their_end(1, wait_in_a_backend, limit, told, stderr=stderr, timeout=30)
    assert (ended, output) == (status, "")


@pytest.mark.slow
def test_it_ends_although_the_store_does_not_answer(black_hole):
    [(ended, output)] = run_ranks_to_their_end(1, wait_in_a_backend, 0.5, store=black_hole, timeout=30)
    assert ended == 1
    assert re.fullmatch(rf"{WAITED} \(\d s\); the launcher's store does not answer", output.strip())


def test_sigterm_is_answered_while_the_store_does_not_answer(black_hole):
    started = time.monotonic()
    ends = run_ranks_to_their_end(1, wait_in_a_backend, 2.0, told=signal.SIGTERM, store=black_hole, timeout=30)
    assert ends == [(143, f"{WAITED}{TOLD}\n")]
    assert time.monotonic() - started < 10, "the store is given longer than that"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (b"rank 6 was \x1b[2Jin F\nrank 9: error: forged \x07line\r", "rank 6 was [2Jin F rank 9: error: forged line"),
        (b"x" * 2**22, "x" * 297 + "..."),
    ],
    ids=["control characters", "long"],
)
def test_what_a_stranger_left_is_one_line(left, said):
    words = ((4, b"rank 4 waited for F of microbatch 8 from rank 5"), (6, left))
    [(ended, output)] = run_ranks_to_their_end(1, wait_in_a_backend, 0.5, words=words, timeout=30)
    assert ended == 1
    assert re.fullmatch(rf"{WAITED} \(\d s\); {re.escape(said)}\n", output)


def test_one_broken_word_hides_no_silent_rank():
    [(ended, output)] = run_ranks_to_their_end(1, wait_in_a_backend, 0.5, words=((4, b"\xff"),), timeout=30)
    assert ended == 1 and output.strip().endswith("; no word from rank 6")


def test_its_children_end_with_it(tmp_path):
    file = tmp_path / "child"
    [(ended, _)] = run_ranks_to_their_end(1, wait_in_a_backend, 0.5, stderr="full", child=str(file), timeout=30)
    assert ended == 1
    deadline, child = time.monotonic() + 5, int(file.read_text())
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_printable_text_stays_as_it_is():
    line = "rank 3 was in pass F of microbatch 5 (日本語, é)"
    assert printable(line) == line
    assert len(printable("ab " * 1000)) <= 300
    assert printable("a\u202eb\u2028c") == "a b c"
