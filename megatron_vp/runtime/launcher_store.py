"""Texts that the ranks of a job leave for each other in the launcher's store, and read within a time limit.

The store works before process groups exist and after a peer is lost. It has no password, so its contents are untrusted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, distributed_c10d
from torch.distributed.rendezvous import rendezvous

PATIENCE_SECONDS = 600.0
"""Default limit on how long a rank waits for other ranks: the default of `--distributed-timeout-minutes`."""
_met: Store | None = None
"""Kept, because rank 0's server stops when its process drops the last reference."""


def launcher_store(seconds: float = PATIENCE_SECONDS) -> Store:
    """Return the launcher's store, or a store that rank 0 serves."""
    global _met
    if distributed_c10d.is_initialized():
        return distributed_c10d._get_default_store()
    if _met is None:
        _met, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds))))
    return _met


class Notes:
    """At most one text of each rank about `topic`."""

    def __init__(self, topic: str, store: Store | None = None) -> None:
        # A launcher that restarts the ranks keeps the store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"megatron_vp/{topic}/{attempt}", store or launcher_store())

    def leave(self, rank: int, text: str = "") -> None:
        """Leave a text, which replaces the rank's earlier one."""
        self._store.set(str(rank), text)

    def read(self, ranks: Iterable[int], seconds: float = 0.0) -> dict[int, str]:
        """Return the texts of `ranks`, without those that leave none within `seconds`."""
        wanted, began = list(map(str, ranks)), time.monotonic()
        while not self._store.check(wanted) and (passed := time.monotonic() - began) < seconds:
            time.sleep(min(max(passed / 20, 0.02), 1.0, seconds - passed))
        left = (rank for rank in wanted if self._store.check([rank]))
        return {int(rank): self._store.get(rank).decode(errors="replace") for rank in left}


def named(ranks: Iterable[int]) -> str:
    """Name ranks in a message: "rank 1", or "ranks 1, 2 and 5"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def counted(ranks: list[int]) -> str:
    """Name a group of ranks by its size and its first rank."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks (the first is rank {ranks[0]})"
