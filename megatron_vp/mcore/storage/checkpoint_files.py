"""Checks that checkpoints can be written, and makes Megatron replace its tracker file atomically.

The tracker file names the last checkpoint. Megatron empties this file, and then writes the new iteration number. If the
writing rank dies in between, or if the disk is full, Megatron can no longer find the last good checkpoint.
"""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_vp.errors import UserError
from megatron_vp.mcore.storage import attempt

TRACKER = "latest_checkpointed_iteration.txt"


def check_writable(option: str, folder: str | os.PathLike[str]) -> None:
    """Raise UserError unless `folder` is writable or could be created. This function does not create the folder."""
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{option} {folder} cannot be a directory: {existing} is a file; choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder} cannot be used: {existing} is not writable; choose another directory")


class _Files:
    """Wraps the interface through which Megatron opens files, and replaces the tracker file atomically."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: str, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = self._original.open
        if mode != "w" or os.path.basename(path) != TRACKER:
            return opened(path, mode, *args, **kwargs)
        return _noted(_replaced(path) if opened is builtins.open else opened(path, mode, *args, **kwargs))


@contextmanager
def _noted(tracker: AbstractContextManager[IO[str]]) -> Iterator[IO[str]]:
    """Record that a checkpoint was saved, once Megatron has written the tracker file. Megatron writes this file only
    after all ranks have written their parts of the checkpoint.
    """
    with tracker as file:
        yield file
    attempt.remove("unsaved")


@contextmanager
def _replaced(path: str) -> Iterator[IO[str]]:
    partial = f"{path}.partial"
    with open(partial, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def unpadded_ranges(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return (start, end, bucket) by parameter, as in Megatron's `param_index_map`, but without the padding."""
    ranges, before = {}, 0
    shifts = []
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - before)
        before += bucket.numel_unpadded
    for parameter, (start, end, bucket) in buffer.param_index_map.items():
        ranges[parameter] = (start - shifts[bucket], end - shifts[bucket], bucket)
    return ranges


def _without_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as put_back:
            for buffer in self.buffers:
                put_back.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
                buffer.param_index_map = unpadded_ranges(buffer)
            return original(self, *args, **kwargs)

    return sharded_param_state
