"""Worker processes for a command, one per core."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe, active_children, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from typing import Any

from megatron_vp.errors import UserError


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A process pool whose workers end at once if an exception leaves the `with` block or if the parent is killed."""
    with ProcessPoolExecutor(processes, _context(), initializer=_end_with_parent) as pool:
        _start(pool, processes)
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise


@contextmanager
def asked_process(prepare: Callable[[], None], answer: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Start a process that calls `prepare`, and yield a function that calls `answer` in that process.

    The process is terminated at the end of the `with` block. `prepare` and `answer` must be module-level functions.
    Unlike a pool, the started process needs no thread in the calling process, so a pool that is started inside the
    block can still fork its workers.
    """
    context = _context()
    ours, theirs = Pipe()
    process = context.Process(target=_answer, args=(theirs, prepare, answer), daemon=True)
    with _deaf_to_interruptions():
        process.start()
    theirs.close()

    def ask(*question: Any) -> Any:
        try:
            ours.send(question)
            return ours.recv()
        except (EOFError, OSError):
            process.join(timeout=1)
            raise UserError(
                f"the process that checks the job exited with code {process.exitcode}; if the system killed it, free "
                "some memory and try again"
            ) from None

    try:
        yield ask
    finally:
        process.terminate()
        process.join()


def _answer(questions: Connection, prepare: Callable[[], None], answer: Callable[..., Any]) -> None:
    _end_with_parent()
    prepare()
    while True:
        questions.send(answer(*questions.recv()))


def _context() -> ForkContext | SpawnContext:
    """Choose whether processes are forked or spawned.

    Forked processes are ready at once, but a fork is safe only if no other thread can hold a lock. Once torch is
    imported, processes are always spawned, because torch has threads that Python does not count.
    """
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    return get_context("fork") if alone else get_context("spawn")


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start all workers."""
    with _deaf_to_interruptions():
        for _ in range(processes):
            pool.submit(int)


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
