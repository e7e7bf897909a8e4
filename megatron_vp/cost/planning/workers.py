"""Processes that share the work of a command, a core each."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that ends at once, and in silence, when its block is left by an exception, such as an interruption.

    A process that is killed leaves its block without one. The workers notice that by themselves.
    """
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_end_with_parent) as pool:
        _start(pool, processes)
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start all workers, deaf to the interruption that a terminal sends them too: they inherit what is blocked here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(processes):
            pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this worker when its parent is gone, whatever it is doing: it would wait for work that nobody sends."""
    threading.Thread(target=_watch_parent, name="parent", daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None  # this runs in a worker
    parent.join()
    os._exit(1)
