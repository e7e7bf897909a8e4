"""Ends a process that cannot continue, and prints one line that says where the process and its peers were stuck.

A rank that waits for a peer is inside the backend's code, where neither an exception nor a Python signal handler
reaches it. A rank whose data loader hangs raises no exception. A separate thread can detect both cases with the help of
`Progress`, and can end the process.

The ranks of a stalled pipeline find out, through the launcher's store, which rank holds up the others. The first rank
that reaches its time limit or loses a connection calls the roll. Every rank that is stuck then records what it is
doing, even before its own time limit, so the records do not depend on which rank reaches its limit first. The caller
and all ranks that fail later read these records. A rank without a record has been suspended, has exited, is
unreachable, or is still making progress.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megatron_vp.errors import at_last, printable, say
from megatron_vp.runtime.launcher_store import Notes, named
from megatron_vp.runtime.progress import Progress

_LOOK_SECONDS = 1.0
"""Time between two looks at the progress, or at the store of a stuck rank for a roll call, in seconds."""
_SECONDS_TO_ANSWER = 4.0
"""How long the other ranks may take to answer a roll call."""
_LAST_WORDS_SECONDS = 1.0
"""Seconds that a rank stays alive after collecting all answers. If it exited right away, peers that are still
collecting answers would report its broken connections instead of the answers.
"""
_STORE_SECONDS = 10.0
"""Time limit for each operation on the store, in seconds, when a rank answers a roll call."""


class Watchdog:
    """Watches one pipeline rank from a separate thread.

    Args:
        progress: the progress of the rank.
        first_limit: seconds that the rank may go without progress in its first iteration, when kernels are compiled.
        limit: the same limit from the second iteration on.
    """

    def __init__(self, progress: Progress, first_limit: float, limit: float) -> None:
        self._progress, self._first_limit, self._limit = progress, first_limit, limit
        self._own = progress.members[progress.rank]
        self._call = -1 - progress.members[0]
        """In place of a rank in the notes: the roll of this pipeline has been called."""
        self._told = _pipe_of_sigterm()
        self._looking, self._answering = threading.Lock(), threading.Lock()
        """Each is held while its thread reads the progress or contacts the store, and forever after `_stop`."""

    def start(self) -> None:
        """Start watching; the threads do not keep the process alive."""
        global _running
        _running, self._progress.others = self, self.others
        for each in (self.answer, self.watch):
            threading.Thread(target=each, name=f"watchdog {each.__name__}", daemon=True).start()
        atexit.register(self._stop)

    def _stop(self) -> None:
        """Stop the watchdog's threads before the interpreter exits. From then on, signals end the process without a
        message.

        Up to Python 3.13, an exiting interpreter unwinds the stack of every daemon thread that asks for the interpreter
        lock. If the stack contains PyTorch's C++ code, this aborts the process, and even successful training ends with
        status 134.
        """
        self._looking.acquire(timeout=1)
        self._answering.acquire(timeout=_STORE_SECONDS + 1)
        if self._told is not None:
            _forget()

    def watch(self) -> None:
        """Watch the rank until it stalls or is told to end."""
        place, since = self._progress.place(), time.monotonic()
        while True:
            limit = self._first_limit if self._progress.iteration < 2 else self._limit
            if self._sleep():
                end_process(128 + signal.SIGTERM, f"error: {self._progress.sentence()} when it received SIGTERM")
            with self._looking:
                now, before, place = time.monotonic(), place, self._progress.place()
            if place != before:
                since = now
            stood = now - since
            # Outside a schedule, Megatron's own time limits apply.
            if stood >= limit and place[1] is not None:
                said = self._progress.sentence()
                others = self.others()
                time.sleep(_LAST_WORDS_SECONDS)
                end_process(1, f"error: {said} ({stood:.0f} s){others}")

    def answer(self) -> None:
        """Record what this rank is doing, if another rank calls the roll while this rank is stuck. A rank that makes
        progress does not contact the store.

        This method never returns, and a store may never answer, so it needs its own thread.
        """
        place = notes = None
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._answering, suppress(Exception):  # The process that hosts the store may have exited.
                before, place = place, self._progress.place()
                if place == before:
                    notes = notes or _notes(_STORE_SECONDS)
                    if notes.read([self._call]):
                        notes.leave(self._own, self._progress.sentence())

    def others(self) -> str:
        """Record what this rank is doing, call the roll, and return a text that names the ranks that hold up the
        pipeline. The main thread calls this when a connection breaks.

        The text lists the ranks that do not wait for others, then the ranks without a record.
        """
        peers = [rank for rank in self._progress.members if rank != self._own]
        answers: list[dict[int, str]] = []

        def ask() -> None:
            with suppress(Exception):
                notes = _notes(2 * _SECONDS_TO_ANSWER)
                notes.leave(self._own, self._progress.sentence())
                notes.leave(self._call)
                answers.append(notes.read(peers, _SECONDS_TO_ANSWER))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(3 * _SECONDS_TO_ANSWER)
        if not answers:
            return "; the launcher's store does not answer"
        heard = answers[0]
        waits = self._progress.place()[1] is not None
        busy = [printable(said) for _, said in sorted(heard.items()) if waits and " waited " not in said]
        silent = [rank for rank in peers if rank not in heard]
        return "".join(f"; {each}" for each in [*busy, *([f"no word from {named(silent)}"] if silent else [])])

    def _sleep(self) -> bool:
        """Sleep until it is time for the next look, or until this process receives SIGTERM. Return whether it has."""
        if self._told is None:
            time.sleep(_LOOK_SECONDS)
            return False
        readable, _, _ = select.select([self._told], [], [], _LOOK_SECONDS)
        return bool(readable) and signal.SIGTERM in os.read(self._told, 64)


def _notes(seconds: float) -> Notes:
    """The ranks' records, with a limit of `seconds` for each operation on the store."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))
    return Notes("stalled", store)


_running: Watchdog | None = None


def others_of_a_lost_peer() -> str:
    """Name the ranks that hold up the pipeline; "" without a watchdog. Used if a connection breaks while no schedule
    runs.
    """
    return "" if _running is None else _running.others()


def end_process(status: int, line: str | None = None) -> NoReturn:
    """Print `line`, kill this process's children, and exit at once, even if printing or killing fails.

    Any thread may call this function. Exit handlers and destructors do not run, because they would wait for peers that
    may be gone. The children are the processes of `multiprocessing`: data loader workers and checkpoint writers.
    """
    try:
        at_last(lambda: None if line is None else say(line))
        for child in multiprocessing.active_children():
            with suppress(Exception):
                child.kill()
    finally:
        os._exit(status)


def _pipe_of_sigterm() -> int | None:
    """Return a file descriptor that becomes readable when this process receives SIGTERM from a launcher or a scheduler,
    even while the main thread runs backend code. From then on, SIGTERM does not end the process.

    Returns None outside the main thread, or if the process ignores SIGTERM or handles it elsewhere, as with Megatron's
    --exit-signal-handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # Python writes each signal to the wakeup fd, and so to the pipe.
    # Without this call, a forked child would write into its parent's pipe.
    os.register_at_fork(after_in_child=_forget)
    return reader


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
