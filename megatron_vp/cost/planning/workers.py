"""Worker processes for a command, one per core."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.context import ForkContext, SpawnContext


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A process pool whose workers end at once if an exception leaves the `with` block or if the parent is killed."""
    with ProcessPoolExecutor(processes, _context(), initializer=_end_with_parent) as pool:
        with _deaf_to_interruptions():
            for _ in range(processes):  # Starts all workers.
                pool.submit(int)
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise


def _context() -> ForkContext | SpawnContext:
    """Choose whether processes are forked or spawned.

    Forked processes are ready at once, but a fork is safe only if no other thread can hold a lock. Once torch is
    imported, processes are always spawned, because torch has threads that Python does not count.
    """
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    return get_context("fork") if alone else get_context("spawn")


@contextmanager
def _deaf_to_interruptions() -> Iterator[None]:
    """Block SIGINT in processes that are started in this context, so that Ctrl-C does not end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Exit this worker when its parent process ends; otherwise it would wait forever for work."""
    threading.Thread(target=_watch_parent, name="parent", daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
