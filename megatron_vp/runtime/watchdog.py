"""Ends a process that cannot continue, and prints one line that says where the process was stuck.

A rank that waits for a peer is inside the backend's code, where neither an exception nor a Python signal handler
reaches it. A rank whose data loader hangs raises no exception. A separate thread can detect both cases with the help of
`Progress`, and can end the process.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import NoReturn

from megatron_vp.errors import at_last, printable, say
from megatron_vp.runtime.progress import Progress
from megatron_vp.runtime.roll_call import RollCall

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals with which a launcher, a scheduler or a closing terminal ends a process."""
_LOOKS_A_LIMIT = 20
_LONGEST_LOOK_SECONDS = 5.0
_SECONDS_TO_ANSWER = 3.0
"""Minimum time limit in seconds for the other ranks' answers to a roll call. Stuck ranks check for a roll call at least
once per second. After a termination signal, the limit is shorter.
"""
_LAST_WORDS_SECONDS = 1.0
"""Seconds that a rank stays alive after collecting all answers. If it exited right away, peers that are still
collecting answers would report its broken connections instead of the answers.
"""
_TOLD_SECONDS = 2.0
"""Seconds that a process may continue after a termination signal, to ask its peers what they are doing."""


class Watchdog:
    """Watches one pipeline rank from a separate thread.

    Args:
        progress: the progress of the rank.
        first_limit: seconds that the rank may go without progress in its first iteration, when kernels are compiled.
        limit: the same limit from the second iteration on.
    """

    def __init__(self, progress: Progress, first_limit: float, limit: float) -> None:
        self._progress = progress
        self._first_limit = first_limit
        self._limit = limit
        self._roll_call = RollCall(progress)
        self._told: int | None = None
        """The first signal that told this process to end."""
        self._signals = _signals()
        self._looking = threading.Lock()
        """Held while the watchdog reads the progress, and forever after `_stop`."""

    def start(self) -> None:
        """Start watching; the threads do not keep the process alive."""
        global _running
        _running, self._progress.others = self, self.others
        limit = min(self._first_limit, self._limit)
        threading.Thread(target=self._roll_call.answer, args=(limit,), name="roll call", daemon=True).start()
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        atexit.register(self._stop)

    def _stop(self) -> None:
        """Stop the watchdog's and the roll call's threads before the interpreter exits. From then on, signals end the
        process without a message.

        Up to Python 3.13, an exiting interpreter unwinds the stack of every daemon thread that asks for the interpreter
        lock. If the stack contains PyTorch's C++ code, this aborts the process, and even successful training ends with
        status 134.
        """
        self._looking.acquire(timeout=1)
        self._roll_call.close()
        if self._signals is not None:
            _forget(self._signals[1])

    def watch(self) -> None:
        """Watch the rank, and end the process if watching itself fails.

        Without a running watchdog, the process would obey neither time limits nor signals.
        """
        try:
            self._watch_until_the_end()
        except BaseException as error:
            reason = printable(f"{type(error).__name__}: {error}")
            self._end(f"{self._progress.sentence()}, and its watchdog failed ({reason})")

    def _watch_until_the_end(self) -> None:
        place, since = self._progress.place(), time.monotonic()
        while True:
            limit = self._first_limit if self._progress.iteration < 2 else self._limit
            self._sleep(min(limit / _LOOKS_A_LIMIT, _LONGEST_LOOK_SECONDS))
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
                others = self._roll_call.ask(min(max(limit / 5, _SECONDS_TO_ANSWER), 20.0), self._sleep)
                if self._told is None:
                    self._sleep(_LAST_WORDS_SECONDS)
            else:
                # A rank that has made progress recently does not start a roll call.
                others = self._roll_call.ask(_LAST_WORDS_SECONDS, self._sleep, call=stood >= limit / 4)
            self._end(f"{said} ({stood:.0f} s)" if self._told is None else said, others)

    def _end(self, said: str, others: str = "") -> NoReturn:
        if self._told is None:
            end_process(1, f"error: {said}{others}")
        name = signal.Signals(self._told).name
        end_process(128 + self._told, f"error: {said} when it received {name}{others}")

    def others(self) -> str:
        """Name the ranks that hold up the pipeline; the main thread calls this when a connection breaks."""
        # This sleep need not end at a signal, because the watchdog's thread still checks for signals.
        return self._roll_call.ask(_SECONDS_TO_ANSWER, _sleep)

    def _sleep(self, seconds: float) -> float:
        """Sleep, but wake up at a termination signal; return how many more seconds the process may continue."""
        if self._signals is None:
            return _sleep(seconds)
        reader, ours = self._signals
        ready, _, _ = select.select([reader], [], [], seconds)
        told = ours.intersection(os.read(reader, 64)) if ready else ()
        self._told = self._told or next(iter(told), None)
        return math.inf if self._told is None else _TOLD_SECONDS


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return math.inf


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
    os.set_blocking(writer, False)
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
