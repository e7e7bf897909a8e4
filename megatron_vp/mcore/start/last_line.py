"""Prints why a job refuses to start, in one line at the end of its log, after all other output of its ranks.

The refusing ranks communicate through the launcher's store, or through a store that rank 0 serves. Each rank first
flushes its own output. Then one rank prints the line for all ranks. All ranks exit together, because launchers stop
every rank as soon as one has exited.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from megatron_vp.errors import at_last, printable, say

_refusals = itertools.count()


class _ToldToEnd(Exception):
    """Raised if this rank, while it waits for other ranks, gets SIGTERM from a launcher that is stopping the job."""


def refuse_together(reason: str, seconds: float) -> None:
    """Print why the job is refused, in one line and on only one rank.

    The line names the ranks that gave each reason, unless all ranks gave the same reason. Returns when this rank or
    another rank has printed the line. Each wait for other ranks ends after `seconds`, because ranks without a reason to
    refuse do not call this function.
    """
    at_last(lambda: None)  # Flush this rank's output, which must precede the line.
    printed, who = False, os.environ.get("RANK")
    with suppress(Exception):  # The store may be unreachable, for example because its address is wrong.
        _listen()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks == 1 or _replays():
            who = None
        elif 0 <= rank < ranks:
            printed = _speak_for_all(rank, ranks, reason, seconds)
    if not printed:
        _print(reason if who is None else {reason: f"rank {printable(who, 20)}"})


def _replays() -> bool:
    """Whether this process is a replay, which has no peers and whose store discards all values."""
    from torch import distributed

    return distributed.is_initialized() and distributed.get_backend() == "fake"


def _speak_for_all(rank: int, ranks: int, reason: str, seconds: float) -> bool:
    """Print the line, or wait until another rank has printed it; return whether this rank's reason was printed."""
    from torch.distributed import PrefixStore

    from megatron_vp.mcore.start.meeting import meeting_point

    limit = timedelta(seconds=seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"megatron_vp/refused/{attempt}/{next(_refusals)}", meeting_point(limit))
    store.set(f"reason {rank}", reason)
    store.add("arrived", 1)
    together = _until(lambda: store.add("arrived", 0) == ranks, seconds)
    if (rank == 0 or not together) and store.add("speakers", 1) == 1:
        known = [each for each in range(ranks) if store.check([f"reason {each}"])]
        reasons: dict[str, list[int]] = {}
        for each in known:
            reasons.setdefault(store.get(f"reason {each}").decode(), []).append(each)
        _print(reason if len(reasons) == 1 and together else {told: _ranks(who) for told, who in reasons.items()})
        store.set("said", json.dumps(list(reasons)))
        # The other ranks must read the line before this rank exits: this rank may serve their store, and a launcher
        # stops all other ranks when one rank exits.
        _until(lambda: store.add("heard", 0) >= len(known) - 1, seconds)
        return True
    store.wait(["said"], limit)
    said = json.loads(store.get("said"))
    store.add("heard", 1)
    return reason in said


def _listen() -> None:
    """From now on, SIGTERM ends only the wait for other ranks, not the process."""

    def told(*_: object) -> None:
        raise _ToldToEnd

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, told)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for at most `seconds` until a condition holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def _print(reasons: str | dict[str, str]) -> None:
    """Print one line with the reason that all ranks share, or with each reason and the ranks that gave it."""
    if isinstance(reasons, str):
        line = f"error: {reasons}"
    elif len(reasons) == 1:
        line = "".join(f"{who}: error: {reason}" for reason, who in reasons.items())
    else:
        line = f"error: {'; '.join(f'{who}: {reason}' for reason, who in reasons.items())}"
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SIGTERM must not end this process before it prints the line.
    at_last(lambda: say(line))
    _tell_torchrun(line)


def _tell_torchrun(line: str) -> None:
    """Write the line to the file where torchrun looks for the error of the first failed process."""
    with suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": line, "timestamp": int(time.time())}, file)


def _ranks(who: Sequence[int]) -> str:
    return f"rank {who[0]}" if len(who) == 1 else f"{len(who)} ranks (the first is rank {who[0]})"
