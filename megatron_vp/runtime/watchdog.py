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
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megatron_vp.runtime.progress import Progress

_LOOKS_A_LIMIT = 20
_LONGEST_LOOK_SECONDS = 5.0


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
            if self._signalled(min(limit / _LOOKS_A_LIMIT, _LONGEST_LOOK_SECONDS)):
                _say_and_end(f"{self._progress.sentence()} when it was told to end (SIGTERM)", 128 + signal.SIGTERM)
            now, there = time.monotonic(), self._progress.place()
            if there != place:
                place, since = there, now
            elif there[1] is not None and now - since >= limit:
                others = _roll_call(self._progress, seconds=min(max(limit / 5, 3.0), 20.0))
                _say_and_end(f"{self._progress.sentence()} ({now - since:.0f} s){others}", 1)

    def _signalled(self, seconds: float) -> bool:
        """Sleep, and wake up for SIGTERM."""
        if self._signals is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._signals], [], [], seconds)
        return bool(ready) and signal.SIGTERM in os.read(self._signals, 64)


def _roll_call(progress: Progress, seconds: float) -> str:
    """Who holds the pipeline up: ranks that say nothing within `seconds`, else those that do not wait for anybody.

    The ranks of a stalled pipeline come here within moments of each other and leave word in the launcher's store.
    """
    deadline = time.monotonic() + seconds
    said: dict[int, str] = {}
    with suppress(RuntimeError, KeyError):  # the store may have been in the process that is gone
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))
        # A launcher that starts the ranks again keeps the store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        keys = {rank: f"megatron_vp/stalled/{attempt}/{progress.iteration}/{rank}" for rank in progress.members}
        store.set(keys[progress.members[progress.rank]], progress.sentence())
        while len(said) < len(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
            said = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    if not said:
        return ""
    silent = [f"rank {rank} does not answer" for rank in progress.members if rank not in said]
    busy = [sentence for rank, sentence in said.items() if " waited " not in sentence]
    return "".join(f"; {each}" for each in silent or busy)


def _say_and_end(line: str, status: int) -> NoReturn:
    print(f"error: {line}", file=sys.stderr, flush=True)
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End this process and its children now, from any thread.

    Exit handlers and destructors would wait for peers that may be gone.
    """
    with suppress(ValueError):  # closed
        sys.stdout.flush()
        sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def _signals() -> int | None:
    """A file that becomes readable when SIGTERM comes, also while the main thread is in a backend's code.

    None where somebody else (Megatron's --exit-signal-handler) handles the signal, or outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=_forget_signals)  # a child would write into its parent's file
    return reader


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
