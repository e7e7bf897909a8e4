"""Where checkpoints are written: a directory that takes files, and a tracker that is replaced as a whole.

Megatron empties the file that names the last checkpoint before it writes a new number. A rank that dies in between, or
a full disk, would leave a run that does not know its last good checkpoint.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import Patch

TRACKER = "latest_checkpointed_iteration.txt"


def check_writable(option: str, folder: str | os.PathLike[str]) -> None:
    """Check that files can be made in `folder`, or the folder itself; makes nothing. Raises UserError."""
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{option} {folder} cannot be a directory: {existing} is a file; choose another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: nothing can be written to {existing}; choose another place")


class _Files:
    """Megatron's access to files, with a tracker that is replaced as a whole."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: str, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """As the original; object storage replaces files as a whole anyway."""
        opened = self._original.open
        if opened is builtins.open and mode == "w" and os.path.basename(path) == TRACKER:
            return _replaced(path)
        return opened(path, mode, *args, **kwargs)


@contextmanager
def _replaced(path: str) -> Iterator[IO[str]]:
    partial = f"{path}.partial"
    with open(partial, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


PATCHES = (
    Patch(
        "megatron.training.checkpointing:maybe_msc",
        _Files,
        "the file that names the last checkpoint is emptied before it is written: a fault in between would lose it",
        "value",
    ),
)
