"""Tells the launch script how this attempt of a job has ended.

`slurm/pretrain.sbatch` creates empty files, called marks, in the folder that MEGATRON_VP_ATTEMPT names. Training
removes `unsaved` when it has written a checkpoint, `unfinished` when it has finished, `retry` if every further attempt
would refuse the same input, and `trusted` if Megatron's result validation suspects a GPU. Removing files works even on
a full disk, and the script does not depend on `srun`'s exit status, which may be that of a rank that SLURM killed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_told_to_stop = False


_SUSPECTS_A_GPU = 17
"""Exit status of Megatron's result validation (`EXIT_CODE_FAILED_ON_RESULT_VALIDATION`)."""


@contextmanager
def noting_the_end() -> Iterator[None]:
    """Context for training: on exit, record that training has finished, unless it failed or a signal stopped it."""
    try:
        yield
    except SystemExit as end:
        if not end.code:
            _note_finished()
        elif end.code == _SUSPECTS_A_GPU:
            remove("trusted")
        raise
    _note_finished()


def _note_finished() -> None:
    if not _told_to_stop:
        remove("unfinished")


def remove(mark: str) -> None:
    """Remove a mark of this attempt, if the launch script has made it."""
    folder = os.environ.get("MEGATRON_VP_ATTEMPT")
    if folder:
        with suppress(OSError):
            (Path(folder) / mark).unlink(missing_ok=True)


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def signals_received(self: Any) -> Any:
        global _told_to_stop
        received = original(self)  # The list has one entry per rank; a signal on any rank stops all ranks.
        _told_to_stop = _told_to_stop or any(received)
        return received

    return signals_received
