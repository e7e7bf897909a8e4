"""The last line of a start that cannot work, printed once per job, after all other output of its ranks.

Ranks that refuse meet in the launcher's store, or in the one that rank 0 serves. Each writes its own output first. Then
one of them prints for all, so that the line is the last of the job's log, and all exit together: launchers end every
rank as soon as one has exited.
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
    """This rank got SIGTERM while it waited for others: a launcher ends the job."""


def refuse_together(reason: str, seconds: float) -> None:
    """Print `error: REASON` on one of the refusing ranks, naming the ranks if not all give this reason.

    `seconds`: how long to wait for the other ranks, which may have nothing to refuse. Returns when the line has been
    printed, by this or by another rank.
    """
    at_last(lambda: None)  # flush this rank's output so that it precedes the line
    printed, who = False, os.environ.get("RANK")
    with suppress(Exception):  # no store can be reached, or its address is the refused input
        _listen()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks == 1 or _replays():
            who = None
        elif 0 <= rank < ranks:
            printed = _speak_for_all(rank, ranks, reason, seconds)
    if not printed:
        _print(reason if who is None else {reason: f"rank {printable(who, 20)}"})


def _replays() -> bool:
    """Whether this process is a replay: the only one of its job, without peers and with a store that keeps nothing."""
    from torch import distributed

    return distributed.is_initialized() and distributed.get_backend() == "fake"


def _speak_for_all(rank: int, ranks: int, reason: str, seconds: float) -> bool:
    """Print for all ranks, or wait until another rank has; returns whether this rank's reason was printed."""
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
        # This rank may serve the store, and a launcher ends all others when it leaves.
        _until(lambda: store.add("heard", 0) >= len(known) - 1, seconds)
        return True
    store.wait(["said"], limit)
    said = json.loads(store.get("said"))
    store.add("heard", 1)
    return reason in said


def _listen() -> None:
    """From now on SIGTERM ends the waiting instead of the process."""

    def told(*_: object) -> None:
        raise _ToldToEnd

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, told)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; says whether it holds at last."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def _print(reasons: str | dict[str, str]) -> None:
    """Print the reason of all ranks, or reasons with the ranks that give them, as one line."""
    if isinstance(reasons, str):
        line = f"error: {reasons}"
    elif len(reasons) == 1:
        line = "".join(f"{who}: error: {reason}" for reason, who in reasons.items())
    else:
        line = f"error: {'; '.join(f'{who}: {reason}' for reason, who in reasons.items())}"
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they would cut the line off; this process is about to end
    at_last(lambda: say(line))
    _tell_torchrun(line)


def _tell_torchrun(line: str) -> None:
    """Write the line to the file where torchrun looks for the error of the first failed process."""
    with suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": line, "timestamp": int(time.time())}, file)


def _ranks(who: Sequence[int]) -> str:
    return f"rank {who[0]}" if len(who) == 1 else f"{len(who)} ranks (the first is {who[0]})"
