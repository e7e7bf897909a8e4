"""Counts a rank's bytes: by its device's allocator, or as a replay does if nothing is allocated."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_vp.mcore.settled import replay
from megatron_vp.runtime.groups import pipeline_device


class Meter(Protocol):
    """Counts bytes."""

    @property
    def allocated(self) -> int:
        """The bytes allocated now."""

    @property
    def peak(self) -> int:
        """The most since `restart`."""

    def restart(self) -> None:
        """Forget the peak so far."""


class _DeviceMemory:
    """The count of PyTorch's allocator of this process's CUDA device."""

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def meter() -> Meter | None:
    """The counter of this rank's memory; None on a CPU, which has none."""
    if replay().meter is not None:
        return replay().meter
    return _DeviceMemory() if pipeline_device().type == "cuda" else None


def around_tensors() -> dict[str, int]:
    """Bytes of the device besides tensors; empty without a device. reserved: peak of PyTorch's allocator since
    `restart`. outside: what is used now and not the allocator's: CUDA's context, loaded kernels, libraries' workspaces,
    communicators, and other processes.
    """
    if replay().meter is not None or pipeline_device().type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"reserved": torch.cuda.max_memory_reserved(), "outside": total - free - torch.cuda.memory_reserved()}
