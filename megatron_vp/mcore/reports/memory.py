"""Counts a rank's memory: through its device's allocator or, in a replay of shapes, through a counter of storages."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_vp.mcore.settled import replay
from megatron_vp.runtime.groups import pipeline_device


class Meter(Protocol):
    """Counts bytes of memory."""

    @property
    def allocated(self) -> int:
        """The bytes that are allocated now."""

    @property
    def peak(self) -> int:
        """The largest number of bytes allocated at once since `restart`."""

    def restart(self) -> None:
        """Forget the peak so far."""


class _DeviceMemory:
    """The counts of PyTorch's allocator for the CUDA device of this process."""

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def meter() -> Meter | None:
    """The memory counter of this rank; None on a CPU, which has no such counter."""
    if replay().meter is not None:
        return replay().meter
    return _DeviceMemory() if pipeline_device().type == "cuda" else None


def around_tensors() -> dict[str, int]:
    """Counts of device memory that include more than tensors, in bytes; empty without a device. reserved: the largest
    amount that PyTorch's allocator reserved since `restart`. outside: memory now in use outside of that allocator: the
    CUDA context, loaded kernels, workspaces of libraries, communicators, and other processes.
    """
    if replay().meter is not None or pipeline_device().type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"reserved": torch.cuda.max_memory_reserved(), "outside": total - free - torch.cuda.memory_reserved()}
