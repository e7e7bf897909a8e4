"""The exceptions that are told in one line, and how to say a line.

These are the two below and, where paths are those of the user, what storage refuses. Every other exception is a defect
of this project and keeps its traceback.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_LONGEST = 300
"""Characters of a foreign text that are worth a place in a log."""
_PATIENCE_SECONDS = 5.0
_STORAGE_FAILS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EFBIG),
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE),
}


class UserError(ValueError):
    """Raised for input that cannot work. The message says what was given, why it cannot work, and what to do.

    Every command turns it into a single line on standard error and exit status 2; a training job prints the line on
    every rank and exits non-zero.
    """


class PeerLost(RuntimeError):
    """Raised where a rank cannot go on because of a peer or a link. The message says where in the schedule it waited.

    A training job prints the line and exits with status 1, on every rank that is left.
    """


def storage_failure(error: BaseException) -> str | None:
    """What storage refused, and of which file; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _STORAGE_FAILS:
        return None
    return f"{error.strerror}{f': {printable(str(error.filename))}' if error.filename else ''}"


@contextmanager
def one_line_for_paths() -> Iterator[None]:
    """Raise a UserError where storage refuses what is done here with paths that were given."""
    try:
        yield
    except OSError as error:
        refused = storage_failure(error)
        if refused is None:
            raise
        raise UserError(f"{refused}; check the paths of this job") from error


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
