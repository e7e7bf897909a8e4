"""Lets the ranks of a stalled pipeline find out, through the launcher's store, which rank holds up the others.

The first rank that reaches its time limit or loses a connection calls the roll. Every rank that is stuck then records
what it is doing, even before its own time limit, so the records do not depend on which rank reaches its limit first.
The caller and all ranks that fail later read these records. A rank without a record has been suspended, has exited, is
unreachable, or is still making progress.

The store has no password, so its contents are untrusted text.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_vp.errors import printable
from megatron_vp.runtime.progress import Progress

_ROUND_SECONDS = 0.1
_LONGEST_LOOK_SECONDS = 1.0
_STORE_SECONDS = 10.0
"""Time limit for each operation on the store, in seconds, when a rank answers a roll call."""
_LONGEST_WORD = 4096
"""Maximum number of bytes to read from a peer's record in the store."""


class RollCall:
    """The roll calls of one pipeline, as seen from one of its ranks."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._own = progress.members[progress.rank]
        # A launcher that restarts the ranks keeps the store, so the keys contain the restart count.
        self._keys = f"megatron_vp/stalled/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._called = f"{self._keys}/called/{progress.members[0]}"
        self._contact = threading.Lock()
        """Held while `answer` reads the progress and contacts the store. `close` takes it and never releases it."""

    def answer(self, limit: float) -> None:
        """Record what this rank is doing, if another rank calls the roll while this rank is stuck.

        This method never returns, so it needs its own thread. A rank that makes progress does not contact the store.
        `limit` is the number of seconds that a rank may go without progress.
        """
        place = store = None
        while True:
            time.sleep(min(limit / 20, _LONGEST_LOOK_SECONDS))
            with self._contact, suppress(Exception):  # The process that hosts the store may have exited.
                before, place = place, self._progress.place()
                if place == before:
                    store = store or _store(_STORE_SECONDS)
                    if store.check([self._called]):
                        self._leave_word(store)

    def close(self) -> None:
        """Stop the thread of `answer`, after its current operation on the store."""
        self._contact.acquire(timeout=_STORE_SECONDS + 1)

    def ask(self, seconds: float, sleep: Callable[[float], float], call: bool = True) -> str:
        """Record what this rank is doing, and return a text that names the ranks that hold up the pipeline.

        The text lists the ranks that do not wait for others, then the ranks without a record. If the store does not
        respond, this method returns after at most about `3 * seconds + 1` seconds. Other ranks have more than `seconds`
        to answer on a busy machine, because the number of polling rounds is fixed and each round takes longer.

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
        return "".join(f"; {each}" for each in [*busy, *([f"no word from {_named(silent)}"] if silent else [])])

    def _ask(self, seconds: float, heard: dict[int, str], call: bool) -> None:
        with suppress(Exception):
            store = _store(2 * seconds)
            said = self._leave_word(store)
            if call:
                store.set(self._called, "")
            elif not store.check([self._called]):
                return
            heard[self._own] = said
            for _ in range(round(seconds / _ROUND_SECONDS)):
                for rank in self._progress.members:
                    if rank not in heard and store.check([self._key(rank)]):
                        word = store.get(self._key(rank))[:_LONGEST_WORD]
                        heard[rank] = printable(word.decode(errors="replace"))
                if len(heard) == len(self._progress.members):
                    return
                time.sleep(_ROUND_SECONDS)

    def _leave_word(self, store: dist.TCPStore) -> str:
        said = self._progress.sentence()
        store.set(self._key(self._own), said)
        return said

    def _key(self, rank: int) -> str:
        return f"{self._keys}/{rank}"


def _store(seconds: float) -> dist.TCPStore:
    """Connect to the launcher's store, with a limit of `seconds` for each operation."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))


def _named(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
