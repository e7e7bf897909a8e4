"""Test that the ranks of a stalled pipeline hear each other in any order, and name the ranks that block the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from megatron_vp.errors import PeerLost
from megatron_vp.runtime import watchdog
from megatron_vp.runtime.progress import Progress
from megatron_vp.schedule.instructions import Instruction, Load, Wait
from megatron_vp.schedule.transfers import Channel, Message
from tests.harness.ranks import run_ranks_to_their_end

LATE = 60.0
"""A limit that no rank reaches."""
ACTIVATION = Wait(Message(Channel.ACTIVATION, 2, 0, 1, 0, 1))
GRADIENT = Wait(Message(Channel.GRADIENT, 1, 2, 1, 2, 1))
READS = "rank 0 was reading the data of microbatch 2"
LOST = "error: rank 2 waited for B of microbatch 1 from rank 2: Connection closed by peer"
Place = Instruction | str | None


def stall(
    rank: int,
    world: int,
    limits: tuple[float, ...],
    places: tuple[Place, ...],
    lost: str | None = None,
    told: float | None = None,
) -> None:
    """Stand still at a place.

    Args:
        limits: of the ranks' watchdogs.
        places: instructions; None: outside a schedule; "moving": from one to the next; "stopped": the process is.
        lost: breaks the connections of rank 2 "at once", or when another rank has "called" the roll.
        told: seconds after which all ranks are told to end.
    """
    watchdog._LOOK_SECONDS = 0.2
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("started", 1)
    while store.add("started", 0) < world:
        time.sleep(0.02)
    progress, place, began = Progress(tuple(range(world)), rank), places[rank], time.monotonic()
    watchdog.Watchdog(progress, limits[rank], limits[rank]).start()
    try:
        with progress.schedule():
            progress.at(place)
            while True:
                time.sleep(0.02)
                if place == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if place == "moving":
                    progress.at(Load(int(50 * time.monotonic())))
                if rank == 2 and (lost == "at once" or (lost and store.check(["megatron_vp/stalled/0/-1"]))):
                    raise RuntimeError("[/gloo/pair.cc:5] Connection closed by peer")
                if told is not None and time.monotonic() - began > told:
                    os.kill(os.getpid(), signal.SIGTERM)
                    told = None
    except PeerLost as error:
        # Outside a schedule it is the launcher that reports a lost peer.
        said = str(error) if place is not None else f"outside{watchdog.others_of_a_lost_peer()}"
        print(f"error: {said}", flush=True)
        os._exit(1)


def ends(limits: tuple[float, ...], places: tuple[Place, ...], left: int | None = None, **options: object) -> list:
    """Exit status and output of every rank; rank `left` is not waited for."""
    return run_ranks_to_their_end(len(places), stall, limits, places, stopped=left, timeout=100, **options)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_whoever_gives_up_first_the_cause_is_named(first):
    """The others' time comes while the first one is asking, or when it is gone."""
    limits = tuple(1.0 if rank == first else 4.0 for rank in range(3))
    results = ends(limits, (Load(2), ACTIVATION, GRADIENT))
    assert re.fullmatch(rf"error: {READS} \(\d s\)\n", results[0][1])
    for status, output in results[1:]:
        assert status == 1 and re.fullmatch(rf"error: rank \d waited .* \(\d s\); {READS}\n", output)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Load(2), READS),
        pytest.param(None, "rank 0 was outside the pipeline schedule", marks=pytest.mark.slow),
        pytest.param("stopped", "no word from rank 0", marks=pytest.mark.slow),
        pytest.param("moving", "no word from rank 0", marks=pytest.mark.slow),
    ],
    ids=["reading data", "outside", "stopped", "moving"],
)
def test_a_rank_that_stands_still_answers_long_before_its_own_limit(place, said):
    """A rank that gets on does not look whether anybody asks."""
    for status, output in ends((LATE, 1.0, 1.0), (place, ACTIVATION, GRADIENT), left=0)[1:]:
        assert status == 1 and output.endswith(f"s); {said}\n")


@pytest.mark.parametrize("lost", ["called", pytest.param("at once", marks=pytest.mark.slow)])
def test_a_rank_that_loses_its_connection_names_the_cause(lost):
    """Another rank has given up, or this is the first to ask; the others answer, as they stand still."""
    limits = (LATE, 1.0 if lost == "called" else LATE, LATE)
    results = ends(limits, (Load(2), ACTIVATION, GRADIENT), lost=lost, told=None if lost == "called" else 10, left=0)
    assert results[2] == (1, f"{LOST}; {READS}\n")


def test_a_rank_that_loses_its_connection_names_the_one_without_a_word():
    results = ends((LATE,) * 3, ("stopped", ACTIVATION, GRADIENT), lost="at once", told=7, left=0)
    assert results[2] == (1, f"{LOST}; no word from rank 0\n")
    assert results[1][0] == 143 and results[1][1].endswith("when it received SIGTERM\n")


@pytest.mark.slow
def test_ranks_outside_the_schedule_name_the_one_without_a_word_too():
    results = ends((16.0,) * 3, ("stopped", None, None), lost="at once", told=7, left=0)
    assert results[2] == (1, "error: outside; no word from rank 0\n")


def test_a_process_ends_well_while_a_thread_looks_at_its_progress():
    """Python 3.12 aborts a process if a daemon thread returns from C++ code while the interpreter ends."""
    ends_soon = """
import os, time, torch
from megatron_vp.runtime import watchdog
from megatron_vp.runtime.progress import Progress

class Finished:
    on_host = torch.zeros(1)

    def count(self):
        return max(self.on_host.item() for _ in range(100))

store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
watchdog._LOOK_SECONDS = 1e-4
for _ in range(8):
    watchdog.Watchdog(Progress((0, 1), 0, Finished()), 1000.0, 1000.0).start()
time.sleep(0.5)
"""
    done = subprocess.run([sys.executable, "-c", ends_soon], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_ends_a_process_whose_watchdog_has_stopped():
    """Nobody reads the watchdog's pipe any more while the interpreter ends."""
    exits = """
import atexit, os, signal
from megatron_vp.runtime.progress import Progress
from megatron_vp.runtime.watchdog import Watchdog

atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # runs after the watchdog has stopped
Watchdog(Progress((0, 1), 0), 1000.0, 1000.0).start()
"""
    done = subprocess.run([sys.executable, "-c", exits], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
