"""Host memory for activations: one block of slots per chunk.

A slot holds the activations of one microbatch. A block has as many slots as an iteration needs at once. The first
forward of a chunk shows how large a slot must be. All slots of the chunk are then allocated as one block. On CUDA, the
block is pinned at its exact size, whereas PyTorch would round the size up to a power of two.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vp.errors import UserError
from megatron_vp.schedule.instructions import Instruction, Post, Wait
from megatron_vp.schedule.transfers import Copy

GIB = 2**30
ALIGNMENT = 512
"""Alignment of tensors in a slot, in bytes: copies are fastest between aligned addresses."""


def slots_by_chunk(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return, by chunk, the largest number of microbatches whose activations are in host memory at once."""
    now: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for each in instructions:
        if isinstance(each, Post) and isinstance(each.operation, Copy) and each.operation.to_host:
            chunk = each.operation.chunk
            now[chunk] += 1
            most[chunk] = max(most[chunk], now[chunk])
        elif isinstance(each, Wait) and isinstance(each.operation, Copy) and not each.operation.to_host:
            now[each.operation.chunk] -= 1
    return dict(most)


class HostSlot:
    """Host memory for the tensors that one forward saved; `chunk` is None if the slot was made for a single use."""

    def __init__(self, memory: torch.Tensor, chunk: int | None) -> None:
        self._memory = memory
        self.chunk = chunk

    def parts(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Split the slot into consecutive parts of the given sizes, in bytes."""
        return [self._memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether the slot is large enough for parts of the given sizes."""
        return _room(sizes) <= self._memory.numel()


class HostMemory:
    """One rank's blocks of host memory, which all iterations reuse. With `pins`, the blocks are pinned for CUDA."""

    def __init__(self, pins: bool) -> None:
        self._pins = pins
        self._needed: Mapping[int, int] = {}
        self._made: dict[int, int] = defaultdict(int)
        self._free: dict[int, list[HostSlot]] = defaultdict(list)
        self._sizes: dict[int, int] = {}
        self._blocks: list[torch.Tensor] = []
        self.odd_slots = 0
        """Number of slots made for a single use, because the saved tensors did not fit into the chunk's slots."""
        self.held_elsewhere: dict[int, list[tuple[str, int]]] = {}
        """By chunk: module and size in bytes of each saved tensor that another reference keeps on the device."""
        self.seconds = 0.0
        """Time spent on allocating the blocks, in seconds."""

    @property
    def bytes(self) -> int:
        """Total size of all blocks in bytes."""
        return sum(block.numel() for block in self._blocks)

    def expect(self, slots: Mapping[int, int]) -> None:
        """Set the number of slots that the next iteration needs for each chunk; see `slots_by_chunk`."""
        self._needed = slots

    def take(self, chunk: int, sizes: Sequence[int]) -> HostSlot:
        """Get a free slot for tensors of the given sizes in bytes. Raises UserError if host memory cannot be pinned."""
        if chunk not in self._sizes:
            self._sizes[chunk] = _room(sizes)
        if not self._free[chunk]:
            self._add_block(chunk)
        if self._free[chunk][-1].fits(sizes):
            return self._free[chunk].pop()
        self.odd_slots += 1
        room = _room(sizes)
        own = torch.empty(room, dtype=torch.uint8, pin_memory=True) if self._pins else _unpinned(room)
        return HostSlot(own, None)

    def give(self, slot: HostSlot) -> None:
        """Free a slot whose contents are no longer needed."""
        if slot.chunk is not None:
            self._free[slot.chunk].append(slot)

    def _add_block(self, chunk: int) -> None:
        size, count = self._sizes[chunk], self._needed[chunk] - self._made[chunk]
        assert count > 0, f"chunk {chunk} needs more host memory slots than were counted in the rank's program"
        start = time.perf_counter()
        block = _pinned(size * count) if self._pins else _unpinned(size * count)
        self._blocks.append(block)
        self._made[chunk] += count
        self._free[chunk] += [HostSlot(block[place * size : (place + 1) * size], chunk) for place in range(count)]
        self.seconds += time.perf_counter() - start


def _unpinned(size: int) -> torch.Tensor:
    # Fake tensors are used to count device memory. The meta device keeps host memory out of this count.
    device = "meta" if isinstance(torch.empty(0), FakeTensor) else "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device)


def _pinned(size: int) -> torch.Tensor:
    block = torch.empty(size, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(block.data_ptr(), size, 0) if size else runtime.cudaError.success
    if error != runtime.cudaError.success:
        raise UserError(
            f"cannot pin {size / GIB:.2f} GiB of host memory for activations ({error}): offload fewer chunks "
            "(--offload-chunks), or raise the limit on locked memory (ulimit -l)"
        )
    return block


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return starts


def _room(sizes: Sequence[int]) -> int:
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
