"""The two exceptions that are told in one line, and how to say a line.

Every other exception is a defect of this project and keeps its traceback.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_LONGEST = 300
"""Characters of a foreign text that are worth a place in a log."""
_PATIENCE_SECONDS = 5.0


class UserError(ValueError):
    """Raised for input that cannot work. The message says what was given, why it cannot work, and what to do.

    Every command turns it into a single line on standard error and exit status 2; a training job prints the line on
    every rank and exits non-zero.
    """


class PeerLost(RuntimeError):
    """Raised where a rank cannot go on because of a peer or a link. The message says where in the schedule it waited.

    A training job prints the line and exits with status 1, on every rank that is left.
    """


def printable(text: str, most: int = _LONGEST) -> str:
    """A text of unknown origin as one line: no control characters or line ends, and cut to `most` characters."""
    words = "".join(each if each.isprintable() else " " for each in text[: 4 * most]).split()
    line = " ".join(words)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def say(line: str) -> None:
    """Print a line on standard error if that is possible. A full disk or a reader that is gone stops nothing."""
    # With standard error closed at the start there is no stream, and `print` would write into standard output.
    if sys.stderr is not None:
        with suppress(Exception):
            print(line, file=sys.stderr, flush=True)


def at_last(speak: Callable[[], None]) -> bool:
    """Call `speak` before the process ends, and return soon whatever it runs into; says whether all was written.

    A thread speaks and is given up after some seconds: a pipe that nobody reads blocks whoever writes to it.
    """
    written: list[bool] = []

    def words() -> None:
        with suppress(Exception):
            speak()
        written.append(all([_flush(sys.stdout), _flush(sys.stderr)]))

    with suppress(Exception):  # no room for a thread
        speaking = threading.Thread(target=words, daemon=True)
        speaking.start()
        speaking.join(_PATIENCE_SECONDS)
    return written == [True]


def _flush(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except Exception:  # closed, or its disk is full
        return False
    return True
