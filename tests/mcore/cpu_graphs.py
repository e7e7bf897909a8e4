"""CUDA graphs on the CPU: a replay recomputes what was captured, in memory that all graphs of a pool share.

As on a device, a replay runs none of a layer's Python code. It recomputes the captured operations one by one, and
writes every result to its address at the capture. Memory that is freed during a capture may be reused by later
operations of the capture. At that point, a replay fills the memory with NaN, so that no operation can read an old value
by luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Place:
    """A tensor in a pool: the address of its memory there, and how it lies in it."""

    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Pool:
    """Memory in blocks, each of a size that was asked for; a block is free where no tensor holds it."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.UntypedStorage] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._used: dict[int, torch.dtype] = {}

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in memory of this pool."""
        size = max(tensor.untyped_storage().nbytes(), 1)
        if self._free[size]:
            address = self._free[size].pop()
        else:
            block = torch.UntypedStorage(size)
            address = block.data_ptr()
            self._blocks[address] = block
        self._used[address] = tensor.dtype
        own = self.tensor(Place(address, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()))
        return own.copy_(tensor)

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None outside of this pool."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._blocks:
            return None
        return Place(address, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def tensor(self, place: Place) -> torch.Tensor:
        """What lies there."""
        return torch.empty(0, dtype=place.dtype).set_(
            self._blocks[place.address], place.offset, place.size, place.stride
        )

    def released(self) -> list[Place]:
        """Blocks that nothing holds any more, each as one row of its last dtype; from now on they are free."""
        found = []
        for address, dtype in list(self._used.items()):
            block = self._blocks[address]
            if torch._C._storage_Use_Count(block._cdata) == 1:
                del self._used[address]
                self._free[block.nbytes()].append(address)
                if dtype in FLOATING:
                    found.append(Place(address, dtype, (block.nbytes() // dtype.itemsize,), (1,), 0))
        return found


class CPUGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    pool: Pool

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def register_generator_state(self, state: Any) -> None:
        """Nothing here is random."""

    def replay(self) -> None:
        """Compute everything again."""
        self.replays += 1

        def found(value: Any) -> Any:
            return self.pool.tensor(value) if isinstance(value, Place) else value

        with torch.no_grad():
            for operation, args, kwargs, results in self.steps:
                outcome = operation(*tree_map(found, args), **tree_map(found, kwargs))
                outcome = outcome if isinstance(outcome, tuple | list) else (outcome,)
                for place, value in zip(results, outcome, strict=True):
                    if place is not None:
                        self.pool.tensor(place).copy_(value)


class _Allocating(TorchDispatchMode):
    """Results of operations lie in a pool; with a graph it also records what is computed."""

    def __init__(self, pool: Pool, graph: CPUGraph | None = None) -> None:
        super().__init__()
        self._pool, self._graph = pool, graph

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._graph:
            self.spoil_released()
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        outcome = operation(*args, **kwargs or {})
        results: list[Place | None] = []

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in given:
                results.append(None)
                return value
            own = self._pool.placed(value)
            results.append(self._pool.place(own))
            return own

        outcome = type(outcome)(map(placed, outcome)) if isinstance(outcome, tuple | list) else placed(outcome)
        if self._graph and (any(results) or operation._schema.is_mutable):
            recorded = tree_map(self._recorded, args), tree_map(self._recorded, kwargs or {})
            self._graph.steps.append((operation, *recorded, results))
        return outcome

    def spoil_released(self) -> None:
        for place in self._pool.released():
            self._graph.steps.append((torch.ops.aten.fill_.Scalar, (place, torch.nan), {}, [None]))

    def _recorded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._pool.place(value) or value.detach()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, values)
    return iter(found)


@contextmanager
def capturing(graph: CPUGraph, pool: Pool, **_: object) -> Iterator[None]:
    """In the place of `torch.cuda.graph`."""
    graph.pool = pool
    with _Allocating(pool, graph) as allocating:
        yield
    allocating.spoil_released()


class _Nothing:
    """A stream or an event of a device that computes at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass


class Device:
    """In the place of `torch`, for Megatron's module of graphs: everything is torch's but what needs a device."""

    def __init__(self) -> None:
        self._C = mock.Mock(
            _cuda_beginAllocateCurrentThreadToPool=self._begin, _cuda_endAllocateToPool=lambda *_: self._end()
        )
        names = dict.fromkeys(("Event", "Stream", "current_stream", "default_stream"), _Nothing)
        self.cuda = mock.Mock(
            **names,
            CUDAGraph=self._new_graph,
            graph=capturing,
            graph_pool_handle=Pool,
            device_count=lambda: 0,
            memory_stats=lambda: defaultdict(int),
        )
        self.graphs: list[CPUGraph] = []
        self._allocating: list[_Allocating] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _new_graph(self) -> CPUGraph:
        self.graphs.append(CPUGraph())
        return self.graphs[-1]

    def _begin(self, device: object, pool: Pool) -> None:
        self._allocating.append(_Allocating(pool).__enter__())

    def _end(self) -> None:
        self._allocating.pop().__exit__(None, None, None)
