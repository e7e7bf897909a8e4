"""Lets a run continue if its TensorBoard events can no longer be written.

TensorBoard writes events in a separate thread. If a write fails, TensorBoard raises the error in the training loop, at
the next call that logs or flushes events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_vp.files import warn_once
from megatron_vp.mcore.patches import Patch


def _forgiving(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def write(self: Any, *data: bytes) -> None:
        # After a failed write, nothing more is written, because TensorBoard cannot read past an incomplete record.
        if getattr(self, "_megatron_vp_gave_up", False):
            return
        try:
            original(self, *data)
        except OSError as error:
            self._megatron_vp_gave_up = True
            warn_once(f"warning: cannot write TensorBoard events: {error.strerror}; the run continues without them")

    return write


_WHY = "continue training when the disk that holds --tensorboard-dir is full"
PATCHES = (
    Patch("tensorboard.summary.writer.record_writer:RecordWriter.write", _forgiving, _WHY),
    Patch("tensorboard.summary.writer.record_writer:RecordWriter.flush", _forgiving, _WHY),
)
