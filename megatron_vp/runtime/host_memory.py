"""Host memory for activations: slots that each hold what one forward of a chunk saved.

A slot is allocated when a copy first needs it, and all iterations reuse it. On CUDA, a slot is pinned at its exact
size, whereas PyTorch would round it up to a power of two.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.errors import UserError

GIB = 2**30
ALIGNMENT = 512
"""Alignment of tensors in a slot, in bytes: copies are fastest between aligned addresses."""
SPARE = 8
"""A slot that replaces a smaller one has 1 / SPARE of its size to spare, so that slots are rarely replaced."""


def parts(slot: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split a slot into consecutive parts of the given sizes, in bytes."""
    return [slot[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]


class HostMemory:
    """One rank's slots in host memory: bytes for the tensors that one forward of a chunk saved. With `pins`, they are
    pinned for CUDA.
    """

    def __init__(self, pins: bool) -> None:
        self._pins = pins
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Free slots by chunk, in ascending order of their sizes."""

    def take(self, chunk: int, sizes: Sequence[int]) -> torch.Tensor:
        """Get a slot for tensors of the given sizes in bytes. Raises UserError if host memory cannot be pinned.

        Forwards save different amounts if experts get different numbers of tokens. If all free slots are too small, a
        larger one, with room to spare, replaces the smallest. So there are never more slots than are used at once.
        """
        free, room = self._free[chunk], _starts(sizes)[-1]
        first = bisect_left(free, room, key=torch.Tensor.numel)
        if first < len(free):
            return free.pop(first)
        if free:
            smallest = free.pop(0)
            if self._pins:
                _unpin(smallest)
            del smallest  # Before the larger slot is allocated.
            room += room // SPARE
        return _pinned(room) if self._pins else _unpinned(room)

    def give(self, chunk: int, slot: torch.Tensor) -> None:
        """Free a slot whose contents are no longer needed."""
        insort(self._free[chunk], slot, key=torch.Tensor.numel)


def _unpinned(size: int) -> torch.Tensor:
    # Fake tensors are used to count device memory. The meta device keeps host memory out of this count.
    device = "meta" if isinstance(torch.empty(0), FakeTensor) else "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device)


def _pinned(size: int) -> torch.Tensor:
    if not size:
        return _unpinned(size)
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork copies pinned pages at once. Every data loader worker would copy the whole slot.
    mapping.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # The kernel may be built without huge pages.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    slot = torch.frombuffer(mapping, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(slot.data_ptr(), size, 0)
    if error != runtime.cudaError.success:
        raise UserError(
            f"cannot pin {size / GIB:.2f} GiB of host memory for activations ({error}): offload fewer chunks "
            "(--offload-chunks), or raise the limit on locked memory (ulimit -l)"
        )
    return slot


def _unpin(slot: torch.Tensor) -> None:
    torch.cuda.synchronize()  # A copy may still read the slot. Programs complete even if the host waits anywhere.
    error = torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())
    assert error == torch.cuda.cudart().cudaError.success, f"cannot unpin host memory: {error}"


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each part starts; the last entry is the size of the slot."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
