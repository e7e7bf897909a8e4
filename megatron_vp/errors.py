"""Exceptions that users see as one line, and functions that print one.

They are `UserError`, `PeerLost` and, for paths that a user gave, errors of the file system. Every other exception is a
defect of this project and keeps its traceback.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

_LONGEST = 300
"""Most characters of a foreign text that go into a log."""
_PATIENCE_SECONDS = 5.0
_STORAGE_FAILS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EFBIG),
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE),
}


class UserError(ValueError):
    """Raised for input that cannot work. The message says what was given, why it cannot work, and what to do.

    Every command turns it into a single line on standard error and exit status 2. A training job prints the line once,
    and all ranks exit with that status.
    """


class Refused(UserError):
    """A UserError with several reasons at once, because every start costs half a minute."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(dict.fromkeys(reasons))
        numbered = (f"({number}) {reason}" for number, reason in enumerate(self.reasons, 1))
        several = len(self.reasons) > 1
        super().__init__(f"{len(self.reasons)} reasons: {'; '.join(numbered)}" if several else self.reasons[0])


class Reasons:
    """Collects reasons for a refusal."""

    def __init__(self) -> None:
        self._said: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Note a UserError raised inside and continue. Other errors propagate, unless there are reasons already, of
        which they may be a consequence.
        """
        try:
            yield
        except Refused as error:
            self._said += error.reasons
        except UserError as error:
            self._said.append(str(error))
        except Exception:
            if not self._said:
                raise

    def refuse(self) -> None:
        """Raise what was collected as one error; return if there is nothing."""
        if self._said:
            raise Refused(self._said)


class PeerLost(RuntimeError):
    """Raised if a rank cannot continue because of a peer or a link. The message says where in the schedule it waited.

    A training job prints the line and exits with status 1, on every rank that is left.
    """


def storage_failure(error: BaseException) -> str | None:
    """Describe a storage error and its file; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _STORAGE_FAILS:
        return None
    return f"{error.strerror}{f': {printable(str(error.filename))}' if error.filename else ''}"


@contextmanager
def one_line_for_paths() -> Iterator[None]:
    """Turn storage errors inside the block into a UserError; for paths that a user gave."""
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
    """Print a line on standard error if possible. A full disk or a closed pipe is ignored."""
    # With standard error closed at the start there is no stream, and `print` would write into standard output.
    if sys.stderr is not None:
        with suppress(Exception):
            print(line, file=sys.stderr, flush=True)


def at_last(speak: Callable[[], None]) -> bool:
    """Call `speak` before the process ends; returns soon even if writing blocks, and says whether all was written.

    A thread speaks and is given up after some seconds: a pipe without a reader blocks its writer.
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
        except RuntimeError:  # no room for a thread: better blocked than silent
            words()
        else:
            speaking.join(_PATIENCE_SECONDS)
    return written == [True]


def _flush(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except Exception:  # closed, or its disk is full
        return False
    return True
