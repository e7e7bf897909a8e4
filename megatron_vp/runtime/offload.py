"""Moves a chunk's activations to host memory and back.

During F, every tensor that is saved for the backward is packed into a handle. After F, every storage to which only
saved tensors refer is copied to the host in full. Parameters, caches and shared masks therefore stay on the device.
Pass O frees the storage on the device, and pass R allocates a new storage. The copy-back fills the new storage, and the
backward unpacks views of it. Device memory is allocated and freed only on the compute stream, so the order of the
passes determines how much device memory is in use (PipeOffload, arXiv 2503.01328, appendix C).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_vp.runtime.host_memory import HostMemory, parts
from megatron_vp.runtime.iteration import Iteration
from megatron_vp.runtime.store import Slot
from megatron_vp.runtime.streams import Stream
from megatron_vp.schedule.passes import PassKind
from megatron_vp.schedule.placed_copies import LEAST_OFFLOADED
from megatron_vp.schedule.transfers import Copy

PLAIN = (torch.Tensor, FakeTensor)
"""Tensor types that own their storage. Other tensor types wrap several tensors, which are saved one by one."""


class SavedStorage:
    """A storage that a forward saved; `bytes` holds its contents, or is None while they are on the host."""

    __slots__ = ("bytes",)

    def __init__(self, tensor: torch.Tensor) -> None:
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.bytes: Any = tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)


class SavedTensor(NamedTuple):
    """Takes the place of a tensor in autograd's graph."""

    storage: SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor as a view of the storage."""
        assert self.storage.bytes is not None, "a backward needs activations that are still in host memory"
        return self.storage.bytes.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class SavedForward:
    """The tensors saved by the forward of one chunk and one microbatch."""

    def __init__(self) -> None:
        self._by_storage: dict[int, SavedStorage] = {}
        self.moving: list[SavedStorage] = []
        """The storages to copy; known once the forward has ended."""
        self.sizes: list[int] = []
        """The size in bytes of each storage in `moving`."""
        self.slot: Any = None
        """The slot of host memory to which the storages in `moving` are copied."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Capture a tensor that autograd saves."""
        if isinstance(tensor, torch.nn.Parameter):
            return tensor  # Layers read `main_grad` from a saved parameter.
        storage = tensor.untyped_storage() if type(tensor) in PLAIN else None
        if storage is None or storage.nbytes() < LEAST_OFFLOADED:
            return tensor.detach()  # Saving the tensor itself would create a reference cycle with its graph.
        key = storage._cdata
        if key not in self._by_storage:
            self._by_storage[key] = SavedStorage(tensor)
        offset = int(tensor.storage_offset())
        return SavedTensor(self._by_storage[key], tensor.dtype, tensor.shape, tensor.stride(), offset)

    def close(self, leaf: torch.Tensor | None) -> None:
        """Collect the storages in `moving`, after the forward's output data has been released. Storages to which
        something outside this object still refers stay on the device.

        This call also frees the data of the graph's leaf. The leaf keeps its shape, because autograd compares the
        shapes of a leaf and its gradient.
        """
        if leaf is not None:
            leaf.data = leaf.data.new_empty(1).expand(leaf.shape)
        for storage in self._by_storage.values():
            # Megatron empties outputs that it recomputes, and fills them again.
            if storage.bytes.untyped_storage().nbytes() and _owners(storage.bytes) == _ALONE:
                self.moving.append(storage)
        self._by_storage.clear()
        self.sizes = [storage.bytes.numel() for storage in self.moving]


class Offload:
    """Runs the passes O and R of one iteration, and the copies between device and host.

    Args:
        stream: a stream that is used only for the copies.
        chunks: the rank's chunks whose activations leave the device.
    """

    def __init__(self, iteration: Iteration, stream: Stream, memory: HostMemory, chunks: Collection[int]) -> None:
        self._store, self._observer = iteration.store, iteration.observer
        self._device = iteration.shapes.device
        self._stream = stream
        self._memory = memory
        self.chunks = chunks
        self._saved: dict[tuple[int, int], SavedForward] = {}

    @property
    def handlers(self) -> dict[PassKind, Callable[[int, int], None]]:
        """The handlers of O and R. `ChunkPasses.handlers` explains why they are not stored."""
        return {PassKind.O: self._leave, PassKind.R: self._return}

    @contextmanager
    def saving(self, microbatch: int, chunk: int) -> Iterator[SavedForward | None]:
        """Context manager around F: collects what an offloaded chunk saves, or yields None for other chunks."""
        if chunk not in self.chunks:
            yield None
            return
        saved = self._saved[microbatch, chunk] = SavedForward()
        with saved_tensors_hooks(saved.pack, _unpack):
            yield saved

    def _leave(self, microbatch: int, chunk: int) -> None:
        """Pass O: free the storages on the device, which have been copied to the host."""
        for storage in self._saved[microbatch, chunk].moving:
            storage.bytes = None
        graph = self._store.take(Slot.CHUNK_GRAPH, microbatch, at=chunk)
        self._store.put(Slot.OFFLOADED_GRAPH, microbatch, graph, at=chunk)

    def _return(self, microbatch: int, chunk: int) -> None:
        """Pass R: on the compute stream, allocate the device memory that the copy-back fills."""
        graph = self._store.take(Slot.OFFLOADED_GRAPH, microbatch, at=chunk)
        self._store.put(Slot.CHUNK_GRAPH, microbatch, graph, at=chunk)
        saved = self._saved[microbatch, chunk]
        for storage, size in zip(saved.moving, saved.sizes, strict=True):
            storage.bytes = torch.empty(size, dtype=torch.uint8, device=self._device)

    def post(self, copy: Copy) -> Callable[[], None]:
        """Start a copy, which runs after all copies posted earlier. The function that is returned makes later passes
        wait for it.
        """
        saved = self._saved[copy.microbatch, copy.chunk]
        if copy.to_host:
            saved.slot = self._memory.take(copy.chunk, saved.sizes)
            self._store.put(Slot.ON_HOST, copy.microbatch, saved.slot, at=copy.chunk)
        device = [storage.bytes for storage in saved.moving]
        host = parts(saved.slot, saved.sizes)
        targets, sources = (host, device) if copy.to_host else (device, host)

        def run() -> None:
            with self._observer(copy):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)

        event = self._stream.submit(run)

        def wait() -> None:
            event.wait()
            if not copy.to_host:
                # The graph keeps its saved-tensor hooks, and through them this object, until the whole backward has
                # ended. Drop its references, so that autograd frees each storage once the backward has used it.
                self._saved.pop((copy.microbatch, copy.chunk)).moving = []
                self._memory.give(copy.chunk, self._store.take(Slot.ON_HOST, copy.microbatch, at=copy.chunk))

        return wait

    def finish(self) -> None:
        """End the iteration: make later work wait for all copies."""
        self._stream.synchronise()


def _unpack(saved: Any) -> torch.Tensor:
    return saved.unpack() if isinstance(saved, SavedTensor) else saved


def _owners(tensor: torch.Tensor) -> int:
    """Number of references to the storage of `tensor`, to be compared with `_ALONE`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _owners(torch.empty(1))
"""Number of references to a storage that only one tensor uses."""
