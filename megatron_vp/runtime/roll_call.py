"""Lets the ranks of a stalled pipeline find out, through the launcher's store, which rank holds up the others.

The first rank that reaches its time limit or loses a connection calls the roll. Every rank that is stuck then records
what it is doing, even before its own time limit, so the records do not depend on which rank reaches its limit first.
The caller and all ranks that fail later read these records. A rank without a record has been suspended, has exited, is
unreachable, or is still making progress.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_vp.errors import printable
from megatron_vp.runtime.launcher_store import Notes, named
from megatron_vp.runtime.progress import Progress

_ROUND_SECONDS = 0.1
_LONGEST_LOOK_SECONDS = 1.0
_STORE_SECONDS = 10.0
"""Time limit for each operation on the store, in seconds, when a rank answers a roll call."""


class RollCall:
    """The roll calls of one pipeline, as seen from one of its ranks."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._own = progress.members[progress.rank]
        self._contact = threading.Lock()
        """Held while `answer` reads the progress and contacts the store. `close` takes it and never releases it."""

    def answer(self, limit: float) -> None:
        """Record what this rank is doing, if another rank calls the roll while this rank is stuck.

        This method never returns, so it needs its own thread. A rank that makes progress does not contact the store.
        `limit` is the number of seconds that a rank may go without progress.
        """
        place = contact = None
        while True:
            time.sleep(min(limit / 20, _LONGEST_LOOK_SECONDS))
            with self._contact, suppress(Exception):  # The process that hosts the store may have exited.
                before, place = place, self._progress.place()
                if place == before:
                    called, words = contact = contact or _contact(_STORE_SECONDS)
                    if called.read(self._progress.members[:1]):
                        words.leave(self._own, self._progress.sentence())

    def close(self) -> None:
        """Stop the thread of `answer`, after its current operation on the store."""
        self._contact.acquire(timeout=_STORE_SECONDS + 1)

    def ask(self, seconds: float, sleep: Callable[[float], float], call: bool = True) -> str:
        """Record what this rank is doing, and return a text that names the ranks that hold up the pipeline.

        The text lists the ranks that do not wait for others, then the ranks without a record. If the store does not
        respond, this method returns after at most about `3 * seconds + 1` seconds.

        Args:
            seconds: how long other ranks may take to answer if the machine is idle.
            sleep: function that sleeps for a number of seconds, and returns how many more seconds `ask` may take.
            call: whether this rank calls the roll. If not, and if no other rank has called it, `ask` returns an empty
                text at once.
        """
        heard: dict[int, str] = {}
        asking = threading.Thread(target=self._ask, args=(seconds, heard, call), daemon=True)
        began, most = time.monotonic(), 3 * seconds + 1
        with suppress(Exception):  # The system may refuse to start a thread.
            asking.start()
        while asking.is_alive() and time.monotonic() - began < most:
            most = min(most, time.monotonic() - began + sleep(_ROUND_SECONDS / 2))
        if self._own not in heard:
            return "; the launcher's store does not answer" if call else ""
        others = [rank for rank in self._progress.members if rank != self._own]
        waits = self._progress.place()[1] is not None
        busy = [heard[rank] for rank in others if waits and rank in heard and " waited " not in heard[rank]]
        silent = [rank for rank in others if rank not in heard]
        return "".join(f"; {each}" for each in [*busy, *([f"no word from {named(silent)}"] if silent else [])])

    def _ask(self, seconds: float, heard: dict[int, str], call: bool) -> None:
        with suppress(Exception):
            called, words = _contact(2 * seconds)
            said, members = self._progress.sentence(), self._progress.members
            words.leave(self._own, said)
            if call:
                called.leave(members[0])
            elif not called.read(members[:1]):
                return
            heard[self._own] = said
            # On a busy machine, each round takes longer, and the other ranks get more than `seconds`.
            for _ in range(round(seconds / _ROUND_SECONDS)):
                if silent := [rank for rank in members if rank not in heard]:
                    heard |= {rank: printable(word) for rank, word in words.read(silent, _ROUND_SECONDS).items()}


def _contact(seconds: float) -> tuple[Notes, Notes]:
    """The calls of the roll and the ranks' records, with a limit of `seconds` for each operation on the store."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))
    return Notes("stalled/called", store), Notes("stalled", store)
