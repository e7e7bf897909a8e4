"""Measures a rank's memory with the CUDA allocator or, in a replay with --shapes-only, by adding up storage sizes."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_vp.mcore.settled import replay
from megatron_vp.runtime.groups import pipeline_device


class Meter(Protocol):
    """Counts bytes of memory."""

    @property
    def allocated(self) -> int:
        """The number of bytes that are currently allocated."""

    @property
    def peak(self) -> int:
        """The largest number of bytes that were allocated at the same time since `restart`."""

    def restart(self) -> None:
        """Reset the peak to the bytes that are currently allocated."""


class _DeviceMemory:
    """Reads the statistics of PyTorch's allocator for the CUDA device of this process."""

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def meter() -> Meter | None:
    """Return the memory counter of this rank; None on a CPU, unless the run is a replay with --shapes-only."""
    if replay().meter is not None:
        return replay().meter
    return _DeviceMemory() if pipeline_device().type == "cuda" else None


def around_tensors() -> dict[str, int]:
    """Return two measures of device memory that a `Meter` lacks, in bytes. The mapping is empty without a CUDA device.

    reserved: the largest amount that PyTorch's allocator reserved since `restart`.
    outside: what the CUDA context, kernels, library workspaces, communicators and other processes use now.
    """
    if replay().meter is not None or pipeline_device().type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"reserved": torch.cuda.max_memory_reserved(), "outside": total - free - torch.cuda.memory_reserved()}
