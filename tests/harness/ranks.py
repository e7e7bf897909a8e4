"""Run a function on N ranks, which are forked from a warm server. There is a time limit, and errors name the failing
rank.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 3000
_GRACE_SECONDS = 1.0


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message holds its traceback and the end of its output."""


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    # The server is started with the environment of this moment and serves the whole test session.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    return context


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list:
    """Call `function(rank, world_size, *args, **kwargs)` in `world_size` fresh processes; return the results by rank.

    `function` must be importable, arguments and results picklable. The processes find a store under MASTER_ADDR and
    MASTER_PORT as a launcher's processes do, and no process group (see `process_group`). Raises RankError.
    """
    with _started(world_size, function, args, kwargs) as (_, readers, outputs):
        return _collect(readers, outputs, time.monotonic() + timeout, timeout)


def run_ranks_to_their_end(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    stopped: int | None = None,
    told_after: float | None = None,
    **kwargs: Any,
) -> list[tuple[int | None, str]]:
    """As `run_ranks`, for ranks that are expected to fail: exit status (-N for signal N) and output of every rank.

    The rank `stopped` is not waited for, and has no exit status. `told_after` seconds after it has been stopped all
    ranks get SIGTERM. Raises RankError, with all outputs, where another rank still lives after `timeout` seconds.
    """
    with _started(world_size, function, args, kwargs) as (processes, _, outputs):
        deadline = time.monotonic() + timeout
        if told_after is not None:
            assert stopped is not None
            while not _is_stopped(processes[stopped].pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(told_after)
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        for rank, process in enumerate(processes):
            if rank != stopped:
                process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(processes) if rank != stopped and process.exitcode is None]
        if alive:
            tails = "".join(_tail(output, rank) for rank, output in enumerate(outputs))
            raise RankError(f"ranks {alive} did not end within {timeout:g} s{tails}")
        return [
            (process.exitcode, output.read_text(errors="replace"))
            for process, output in zip(processes, outputs, strict=True)
        ]


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@contextmanager
def _started(
    world_size: int, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Iterator[tuple[list[Any], list[Connection], list[Path]]]:
    """The processes of a case, the pipes of their reports and the files of their output; ended on exit."""
    from torch.distributed import TCPStore

    context = _server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(world_size)]
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, store.port, call, pipes[rank][1], outputs[rank]))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            for _, writer in pipes:
                writer.close()
            yield processes, [reader for reader, _ in pipes], outputs
        finally:
            for process in processes:
                if process.pid is not None:
                    _kill_with_children(process.pid)
                    process.join()
            for reader, _ in pipes:
                reader.close()


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """The default gloo group of this case's ranks, with a short timeout; destroyed where nothing was raised.

    A rank that raises keeps its connections until it has reported, so that it is the first to do so.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def _kill_with_children(pid: int) -> None:
    """End a rank and what it started: checkpoint writers outlive the rank that spawned them.

    A rank leads a session, so its process group has its number for as long as any member lives, itself or not.
    """
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _collect(readers: list[Connection], outputs: list[Path], deadline: float, timeout: float) -> list:
    pending = dict(zip(readers, range(len(readers)), strict=True))
    results: list[Any] = [None] * len(readers)
    failures: dict[int, str] = {}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = pending.pop(reader)
            try:
                good, results[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:
                good, results[rank] = False, "the process died without a report"
            if not good:
                failures[rank] = f"rank {rank} failed:\n{results[rank]}{_tail(outputs[rank], rank)}"
                # The cause may report after a peer that it took along.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        raise RankError("\n".join(failures[rank] for rank in sorted(failures)))
    if pending:
        late = sorted(pending.values())
        tails = "".join(_tail(outputs[rank], rank) for rank in late)
        raise RankError(f"ranks {late} did not finish within {timeout:g} s{tails}")
    return results


def _tail(output: Path, rank: int) -> str:
    text = output.read_text(errors="replace") if output.exists() else ""
    return f"\n--- end of rank {rank}'s output ---\n{text[-_TAIL:]}"


def _rank_main(rank: int, world_size: int, port: int, call: bytes, writer: Connection, output: Path) -> None:
    os.setsid()
    # As where a launcher starts a rank; Megatron's data loaders cannot hand their workers anything otherwise.
    multiprocessing.set_start_method("fork", force=True)
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    try:
        function, args, kwargs = pickle.loads(call)
        report = pickle.dumps((True, function(rank, world_size, *args, **kwargs)))
    except BaseException:
        report = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    writer.send_bytes(report)
    writer.close()
    # Leaving the normal way would run exit handlers that wait for peers which may be gone.
    os._exit(0)
