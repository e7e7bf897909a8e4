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

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals with which a launcher, a scheduler or a closing terminal ends a process."""
_LOOKS_A_LIMIT = 20
_LONGEST_LOOK_SECONDS = 1.0
_SECONDS_TO_ANSWER, _MOST_SECONDS_TO_ANSWER = 3.0, 8.0
"""Limits on how long the other ranks may take to answer a roll call. Stuck ranks check for one once per second."""
_LAST_WORDS_SECONDS = 1.0
"""Seconds that a rank stays alive after collecting all answers. If it exited right away, peers that are still
collecting answers would report its broken connections instead of the answers. Also the time for answers after a
termination signal.
"""
_TOLD_SECONDS = 2.0
"""Seconds that a process may continue after a termination signal, to ask its peers what they are doing."""
_ROUND_SECONDS = 0.1
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
        self._period = min(min(first_limit, limit) / _LOOKS_A_LIMIT, _LONGEST_LOOK_SECONDS)
        self._own = progress.members[progress.rank]
        self._call = -1 - progress.members[0]
        """In place of a rank in the notes: the roll of this pipeline has been called."""
        self._told: int | None = None
        """The first signal that told this process to end."""
        self._signals = _signals()
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
        if self._signals is not None:
            _forget(self._signals[1])

    def watch(self) -> None:
        """Watch the rank until it stalls or is told to end."""
        place, since = self._progress.place(), time.monotonic()
        while True:
            limit = self._first_limit if self._progress.iteration < 2 else self._limit
            self._sleep(self._period)
            with self._looking:
                now, there = time.monotonic(), self._progress.place()
            if there != place:
                place, since = there, now
            stood = now - since
            # Outside a schedule, Megatron's own time limits apply.
            if self._told is None and (stood < limit or there[1] is None):
                continue
            said = self._progress.sentence()
            if self._told is None:
                others = self.others(min(max(limit / 5, _SECONDS_TO_ANSWER), _MOST_SECONDS_TO_ANSWER))
                self._sleep(_LAST_WORDS_SECONDS)
            else:
                # A rank that has made progress recently does not start a roll call.
                others = self.others(_LAST_WORDS_SECONDS, call=stood >= limit / 4)
            if self._told is None:
                end_process(1, f"error: {said} ({stood:.0f} s){others}")
            end_process(128 + self._told, f"error: {said} when it received {signal.Signals(self._told).name}{others}")

    def answer(self) -> None:
        """Record what this rank is doing, if another rank calls the roll while this rank is stuck. A rank that makes
        progress does not contact the store.

        This method never returns, and a store may never answer, so it needs its own thread.
        """
        place = notes = None
        while True:
            time.sleep(self._period)
            with self._answering, suppress(Exception):  # The process that hosts the store may have exited.
                before, place = place, self._progress.place()
                if place == before:
                    notes = notes or _notes(_STORE_SECONDS)
                    if notes.read([self._call]):
                        notes.leave(self._own, self._progress.sentence())

    def others(self, seconds: float = _SECONDS_TO_ANSWER, call: bool = True) -> str:
        """Record what this rank is doing, and return a text that names the ranks that hold up the pipeline. The main
        thread calls this when a connection breaks.

        The text lists the ranks that do not wait for others, then the ranks without a record. Other ranks may take
        `seconds` to answer if the machine is idle. If this rank does not `call` the roll, and no other rank has called
        it, the text is empty.
        """
        heard: dict[int, str] = {}
        members = self._progress.members

        def ask() -> None:
            with suppress(Exception):
                notes, said = _notes(2 * seconds), self._progress.sentence()
                notes.leave(self._own, said)
                if call:
                    notes.leave(self._call)
                elif not notes.read([self._call]):
                    return
                heard[self._own] = said
                # On a busy machine, each round takes longer, and the other ranks get more than `seconds`.
                for _ in range(round(seconds / _ROUND_SECONDS)):
                    if silent := [rank for rank in members if rank not in heard]:
                        found = notes.read(silent, _ROUND_SECONDS)
                        heard.update((rank, printable(word)) for rank, word in found.items())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        ends = time.monotonic() + 3 * seconds + 1
        while asking.is_alive() and time.monotonic() < ends:
            self._sleep(_ROUND_SECONDS / 2)
            if self._told is not None:
                ends = min(ends, time.monotonic() + _TOLD_SECONDS)
        if self._own not in heard:
            return "; the launcher's store does not answer" if call else ""
        waits = self._progress.place()[1] is not None
        del heard[self._own]
        busy = [heard[rank] for rank in sorted(heard) if waits and " waited " not in heard[rank]]
        silent = [rank for rank in members if rank not in heard and rank != self._own]
        return "".join(f"; {each}" for each in [*busy, *([f"no word from {named(silent)}"] if silent else [])])

    def _sleep(self, seconds: float) -> None:
        """Sleep, but wake up at a termination signal."""
        if self._signals is None:
            time.sleep(seconds)
            return
        reader, ours = self._signals
        select.select([reader], [], [], seconds)
        with suppress(BlockingIOError):
            self._told = self._told or next(iter(ours.intersection(os.read(reader, 64))), None)


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


def _signals() -> tuple[int, frozenset[int]] | None:
    """Set up the signals to watch: SIGTERM and SIGHUP, except those that the process ignores (as under `nohup`) or
    handles elsewhere.

    Returns them, after a file descriptor that becomes readable when one arrives, even while the main thread runs
    backend code. Returns None outside the main thread, or if SIGTERM has another handler. Megatron's
    --exit-signal-handler, for example, handles SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    ours = frozenset(number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL)
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Python writes each signal to the wakeup fd, and so to the pipe. These handlers also write to the pipe, in case
    # another library replaces the wakeup fd.
    for number in ours:
        signal.signal(number, lambda number, _: _write(writer, number))
    # Without this call, a forked child would write into its parent's pipe.
    os.register_at_fork(after_in_child=lambda: _forget(ours))
    return reader, ours


def _write(writer: int, number: int) -> None:
    # If the pipe is full, this signal is not needed, because the watchdog will read an earlier one.
    with suppress(OSError):
        os.write(writer, bytes([number]))


def _forget(signals: frozenset[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
