"""Ends a process that cannot go on, with one line that says where it was.

A rank that waits for a peer sits in the backend's own code, where neither an exception nor a Python signal handler
reaches it; a rank whose data loader hangs tells nobody. A thread beside it can see both, because all it has to know is
in `Progress`, and it can end the process.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megatron_vp.errors import at_last, printable, say
from megatron_vp.runtime.progress import Progress

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Sent by a launcher or a scheduler, and when the terminal is closed."""
_LOOKS_A_LIMIT = 20
_LONGEST_LOOK_SECONDS = 5.0
_LAST_WORDS_SECONDS = 1.0
"""How long a rank that has heard its peers leaves them to hear each other."""
_LONGEST_WORD = 4096
"""Bytes of what a peer left in the store that are looked at."""


class Watchdog:
    """Watches one pipeline rank from a thread of its own.

    Args:
        progress: of the rank.
        first_limit: seconds that the rank may be in one place in its first iteration, in which kernels are compiled.
        limit: the same from the second iteration on.
    """

    def __init__(self, progress: Progress, first_limit: float, limit: float) -> None:
        self._progress = progress
        self._first_limit = first_limit
        self._limit = limit
        self._signals = _signals()

    def start(self) -> None:
        """Start watching; the thread does not keep the process alive."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        place, since = self._progress.place(), time.monotonic()
        while True:
            limit = self._first_limit if self._progress.iteration < 2 else self._limit
            self._end_if_told(min(limit / _LOOKS_A_LIMIT, _LONGEST_LOOK_SECONDS))
            now, there = time.monotonic(), self._progress.place()
            if there != place:
                place, since = there, now
            elif there[1] is not None and now - since >= limit:
                line = f"{self._progress.sentence()} ({now - since:.0f} s)"
                end_process(1, f"error: {line}{self._others(seconds=min(max(limit / 5, 3.0), 20.0))}")

    def _others(self, seconds: float) -> str:
        """Who holds the pipeline up: ranks that say nothing within `seconds`, else those that do not wait for anybody.

        Whatever the store does meanwhile, the answer is there soon after, and a signal still ends the process.
        """
        progress, deadline = self._progress, time.monotonic() + seconds
        said: dict[int, str] = {}
        asking = threading.Thread(target=_roll_call, args=(progress, deadline, said), daemon=True)
        with suppress(Exception):  # no room for a thread
            asking.start()
        while asking.is_alive() and time.monotonic() < deadline + 1:
            self._end_if_told(0.05)
        if not said:
            return ""
        # The first process that ends breaks the others' connections, and that error would hide what they have to say.
        self._end_if_told(_LAST_WORDS_SECONDS)
        silent = [f"rank {rank} does not answer" for rank in progress.members if rank not in said]
        busy = [sentence for sentence in [*said.values()] if " waited " not in sentence]
        return "".join(f"; {each}" for each in silent or busy)

    def _end_if_told(self, seconds: float) -> None:
        """Sleep, and wake up for a signal that ends the process."""
        if self._signals is None:
            time.sleep(seconds)
            return
        ready, _, _ = select.select([self._signals.reader], [], [], seconds)
        told = self._signals.ours.intersection(os.read(self._signals.reader, 64)) if ready else ()
        for number in told:
            name = signal.Signals(number).name
            end_process(128 + number, f"error: {self._progress.sentence()} when it was told to end ({name})")


def _roll_call(progress: Progress, deadline: float, said: dict[int, str]) -> None:
    """Put into `said` what the ranks of the pipeline say until `deadline`.

    The ranks of a stalled pipeline come here within moments of each other and leave word in the launcher's store. It
    has no password, so whatever lies there is text that anybody may have written.
    """
    with suppress(Exception):  # the store may have been in the process that is gone
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        store = dist.TCPStore(*address, is_master=False, timeout=limit)
        # A launcher that starts the ranks again keeps the store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        keys = {rank: f"megatron_vp/stalled/{attempt}/{progress.iteration}/{rank}" for rank in progress.members}
        store.set(keys[progress.members[progress.rank]], progress.sentence())
        while len(said) < len(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank, key in keys.items():
                if rank not in said and store.check([key]):
                    said[rank] = printable(store.get(key)[:_LONGEST_WORD].decode(errors="replace"))


def end_process(status: int, line: str | None = None) -> NoReturn:
    """Print `line`, and end this process and its children now, from any thread and whatever else fails.

    Exit handlers and destructors would wait for peers that may be gone. The children are those of `multiprocessing`:
    data loaders' workers, writers of checkpoints.
    """
    try:
        at_last(lambda: None if line is None else say(line))
        for child in multiprocessing.active_children():
            with suppress(Exception):
                child.kill()
    finally:
        os._exit(status)


@dataclass(frozen=True)
class _Signals:
    reader: int
    """A file that becomes readable when a signal comes, also while the main thread is in a backend's code."""
    ours: frozenset[int]
    """The signals that nothing else in this process handles, and that are not ignored (by `nohup`, say)."""


def _signals() -> _Signals | None:
    """None where something else (Megatron's --exit-signal-handler) handles SIGTERM, or outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    ours = frozenset(number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in ours:
        signal.signal(number, lambda number, _: _write(writer, number))  # should another library take the file
    os.register_at_fork(after_in_child=lambda: _forget(ours))  # a child would write into its parent's file
    return _Signals(reader, ours)


def _write(writer: int, number: int) -> None:
    with suppress(OSError):  # full: the watchdog has enough to read
        os.write(writer, bytes([number]))


def _forget(signals: frozenset[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
