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
from contextlib import suppress

from megatron_vp.errors import at_last, printable, say
from megatron_vp.mcore.settled import process

_refusals = itertools.count()


class _ToldToEnd(Exception):
    """Raised if this rank, while it waits for other ranks, gets SIGTERM from a launcher that is stopping the job."""


def refuse_together(reason: str, seconds: float) -> None:
    """Print why the job is refused, in one line and on only one rank.

    The line gives the reason of the first rank that refuses, and names the ranks that gave it, unless all ranks did.
    Returns when this rank or another rank has printed the line. Each wait for other ranks ends after `seconds`, because
    ranks without a reason to refuse do not call this function.
    """
    at_last(lambda: None)  # Flush this rank's output, which must precede the line.
    who, printed = os.environ.get("RANK"), None
    named = "" if who is None else f"rank {printable(who, 20)}: "
    with suppress(Exception):  # The store may be unreachable, for example because its address is wrong.
        from megatron_vp.runtime.launcher_store import Notes, counted, launcher_store

        _listen()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks == 1 or process.replayed is not None:  # A replay has no peers.
            named = ""
        elif 0 <= rank < ranks:
            store, topic = launcher_store(seconds), f"refused/{next(_refusals)}"
            given, printed = Notes(f"{topic}/given", store), Notes(f"{topic}/printed", store)
            given.leave(rank, reason)
            known = given.read(range(ranks), seconds)
            if rank != min(known):
                with suppress(Exception):  # The rank that prints may serve the store, and has printed if it is gone.
                    printed.read([0], seconds)
                return
            alike = [each for each, told in known.items() if told == reason]
            named = "" if len(alike) == ranks else f"{counted(alike)}: "
    line = f"{named}error: {reason}"
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SIGTERM must not end this process before it prints the line.
    at_last(lambda: say(line))
    _tell_torchrun(line)
    if printed is not None:
        with suppress(Exception):
            printed.leave(0)


def _listen() -> None:
    """From now on, SIGTERM ends only the wait for other ranks, not the process."""

    def told(*_: object) -> None:
        raise _ToldToEnd

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, told)


def _tell_torchrun(line: str) -> None:
    """Write the line to the file where torchrun looks for the error of the first failed process."""
    with suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": line, "timestamp": int(time.time())}, file)
