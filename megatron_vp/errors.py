"""Exceptions that users see as a single line, and functions that print such lines.

Users see one line for `UserError`, for `PeerLost`, and for file system errors on user-supplied paths. Any other
exception is a bug in this project and keeps its traceback.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_LONGEST = 300
"""Text of unknown origin is truncated to this many characters before it is logged."""
_PATIENCE_SECONDS = 5.0


class UserError(ValueError):
    """Raised for input that cannot work. The message says what was given, why it cannot work, and what to do.

    Every command turns this error into a single line on standard error and exit status 2. A training job prints the
    line once, and all ranks exit with status 2.
    """


class PeerLost(RuntimeError):
    """Raised if a rank cannot continue because a peer or a link has failed. The message says where in the schedule the
    rank was waiting.

    In a training job, every remaining rank prints the message and exits with status 1.
    """


def storage_failure(error: BaseException) -> str | None:
    """Return one line that describes a storage error and names the file; return None for any other error."""
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError) or not error.strerror:
        return None
    return f"{error.strerror}{f': {printable(str(error.filename))}' if error.filename else ''}"


def printable(text: str, most: int = _LONGEST) -> str:
    """Turn a text of unknown origin into one line of at most `most` characters, without control characters."""
    words = "".join(each if each.isprintable() else " " for each in text[: 4 * most]).split()
    line = " ".join(words)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def say(line: str) -> None:
    """Print a line on standard error if possible. A full disk or a closed pipe is ignored."""
    # If standard error is closed when Python starts, `sys.stderr` is None, and `print` would use standard output.
    if sys.stderr is not None:
        with suppress(Exception):
            print(line, file=sys.stderr, flush=True)


def at_last(speak: Callable[[], None]) -> bool:
    """Call `speak` right before exit, then flush standard output and error; return whether the flushes succeeded.

    `speak` runs in a thread. If it has not finished after a few seconds, for example because a pipe is not read, the
    thread is abandoned.
    """
    written: list[bool] = []

    def words() -> None:
        with suppress(Exception):
            speak()
        written.append(all([_flush(sys.stdout), _flush(sys.stderr)]))

    with suppress(Exception):
        speaking = threading.Thread(target=words, daemon=True)
        try:
            speaking.start()
        except RuntimeError:  # Without a thread, `speak` may block, but its lines are not lost.
            words()
        else:
            speaking.join(_PATIENCE_SECONDS)
    return written == [True]


def _flush(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except Exception:  # The stream is closed, or its disk is full.
        return False
    return True
