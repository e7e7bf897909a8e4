"""Files: reading any input path ends soon, and an output appears complete or not at all."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron_vp.errors import UserError, say

MIB = 2**20


def read_text(path: str | os.PathLike[str], what: str, most: int, errors: str = "strict") -> str:
    """Read the `what` at `path` as UTF-8 text, without a byte order mark.

    A pipe that has a writer is read to its end. `errors` is that of `bytes.decode`. Raises UserError for files that
    cannot be read, are not text or exceed `most` bytes, and for a pipe without a writer.
    """
    try:
        # Opening a pipe would wait for a writer who may never come.
        descriptor = os.open(Path(path), os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            os.set_blocking(descriptor, True)
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            data = b"" if size > most else file.read(most + 1)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from error
    if max(size, len(data)) > most:
        raise UserError(f"cannot read {what} {path}: it has more than {most // MIB} MiB; give the file itself")
    if stat.S_ISFIFO(status.st_mode) and not data:
        raise UserError(f"cannot read {what} {path}: it is a pipe without a writer")
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {what} {path}: it is not text") from error


@contextmanager
def replacing(path: str | os.PathLike[str], most_mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A new binary file that is renamed to `path` when the block ends; nothing is left if the block raises.

    Until then it has a random name in the same folder, and it is created exclusively, so others who can write to the
    folder cannot redirect it through a link. It takes the permissions of the file it replaces, limited by `most_mode`.
    Where `path` is a link, the link is replaced, not what it points to. Raises OSError.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, most_mode)
    try:
        with open(descriptor, "wb") as file:
            if stat.S_ISREG(before := _mode(path)):
                os.fchmod(descriptor, stat.S_IMODE(before) & most_mode)
            yield file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


@contextmanager
def removed_when_told_to_end(folder: Path) -> Iterator[None]:
    """Remove `folder` if SIGTERM or SIGHUP ends the process inside this block, for example at a job's time limit.

    A thread does it, because Python's own handlers wait until the main thread comes back from compiled code. Signals
    that have a handler already, or are ignored, stay with it. Outside of the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def wait() -> None:
        while received := os.read(reading, 1):
            if received[0] in ours:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(128 + received[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in ours:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()
        os.close(reading)


def write_report(path: Path, text: str, what: str) -> None:
    """Write a file that the run does not depend on; it appears complete or not at all. If it cannot be written, print
    one line on standard error, once, and continue.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        warn_once(f"warning: cannot write {what} {path}: {error.strerror}; the run goes on without it")


@functools.cache
def warn_once(line: str) -> None:
    """Print a line on standard error once, with the rank if there is one; ignore failures."""
    rank = os.environ.get("RANK")
    say(line if rank is None else f"rank {rank}: {line}")
