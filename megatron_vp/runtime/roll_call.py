"""What the ranks of a stalled pipeline tell each other, in the launcher's store: who holds the others up.

The first rank that gives up calls the roll. Every rank that stands still then leaves word of where it is, also before
its own time is up, so nobody's answer depends on whose limit comes first. Ranks that give up later, and ranks whose
connection breaks because another has ended, read what was left.

The store has no password, so whatever lies there is text that anybody may have written.
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
_STORE_SECONDS = 10.0
"""How long the store may take to let a rank answer."""
_LONGEST_WORD = 4096
"""Bytes of what a peer left in the store that are looked at."""


class RollCall:
    """The roll calls of one pipeline, as seen from one of its ranks."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._own = progress.members[progress.rank]
        # A launcher that starts the ranks again keeps the store.
        self._keys = f"megatron_vp/stalled/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._called = f"{self._keys}/called/{progress.members[0]}"

    def answer(self, look_seconds: float) -> None:
        """Leave word when another rank calls while this one stands still; never returns, for a thread of its own.

        A rank that gets on does not ask the store anything.
        """
        place = store = None
        while True:
            time.sleep(look_seconds)
            with suppress(Exception):  # the store may have been in a process that is gone
                before, place = place, self._progress.place()
                if place == before:
                    store = store or _store(_STORE_SECONDS)
                    if store.check([self._called]):
                        self._leave_word(store)

    def ask(self, seconds: float, sleep: Callable[[float], float], join: bool = False) -> str:
        """Call the roll, and say who holds the pipeline up: ranks that do not wait for anybody, then silent ones.

        Returns soon after `seconds`, whatever the store does. A machine that is slow in asking waits longer for
        answers: it counts rounds.

        Args:
            seconds: that a machine at rest gives the others to answer.
            sleep: sleeps for that many seconds and returns how many more this may take at most.
            join: take part only if another rank has called; else return an empty text at once.
        """
        heard: dict[int, str] = {}
        asking = threading.Thread(target=self._ask, args=(seconds, heard, join), daemon=True)
        began, most = time.monotonic(), 3 * seconds + 1
        with suppress(Exception):  # no room for a thread
            asking.start()
        while asking.is_alive() and time.monotonic() - began < most:
            most = min(most, time.monotonic() - began + sleep(_ROUND_SECONDS / 2))
        if join and self._own not in heard:
            return ""
        others = [rank for rank in self._progress.members if rank != self._own]
        busy = [heard[rank] for rank in others if rank in heard and " waited " not in heard[rank]]
        silent = [rank for rank in others if rank not in heard]
        return "".join(f"; {each}" for each in [*busy, *([f"no word from {_named(silent)}"] if silent else [])])

    def _ask(self, seconds: float, heard: dict[int, str], join: bool) -> None:
        with suppress(Exception):
            store = _store(2 * seconds)
            if join and not store.check([self._called]):
                return
            store.set(self._called, "")
            heard[self._own] = self._leave_word(store)
            for _ in range(round(seconds / _ROUND_SECONDS)):
                for rank in self._progress.members:
                    if rank not in heard and store.check([self._key(rank)]):
                        said = store.get(self._key(rank))[:_LONGEST_WORD]
                        heard[rank] = printable(said.decode(errors="replace"))
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
    """The launcher's store, which may take `seconds` for anything."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))


def _named(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
