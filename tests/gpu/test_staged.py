"""Test the messages of ranks that share a device."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from tests.gpu.staged import Lane


def test_host_memory_goes_back_in_the_thread_that_issued_the_message():
    """Elsewhere PyTorch would call CUDA there, which waits while this thread loads a kernel, and that for the lane."""
    lane, released, deadline = Lane(), [], time.monotonic() + 10

    def operation(copy: torch.Tensor) -> None:
        weakref.finalize(copy, lambda: released.append(threading.current_thread()))

    while len(released) < 3 and time.monotonic() < deadline:
        lane.issue(operation, [torch.zeros(2)], []).wait()
    assert len(released) >= 3
    assert set(released) == {threading.current_thread()}
