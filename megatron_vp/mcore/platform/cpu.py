"""Lets unmodified Megatron run without CUDA, over gloo.

A module that stands in for `torch.cuda` gives Megatron streams, events and random numbers of a device that computes in
program order; tensors that Megatron creates on "cuda" are on the CPU. Everything else in `torch.cuda` keeps its true
value, because Megatron's checkpointing and torch's compiler need it: only the module that initialises Megatron finds a
device. For each patch, we tested that Megatron fails without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_GENERATOR = torch.default_generator


class _Done:
    """Stands in for a CUDA stream or event, whose work is always done."""

    device = _CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = _nothing

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def record_event(self, event: _Done | None = None) -> _Done:
        return event or _Done()


def _view(module: ModuleType, **own: Any) -> ModuleType:
    """A module that has the attributes `own`, and otherwise those of `module`."""
    view = ModuleType(module.__name__)
    vars(view).update({"__getattr__": lambda name: getattr(module, name), **own})
    return view


def _cuda(original: ModuleType) -> ModuleType:
    return _view(
        original,
        current_device=lambda: _CPU,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        Stream=_Done,
        Event=_Done,
        current_stream=lambda device=None: _Done(),
        default_stream=lambda device=None: _Done(),
        stream=nullcontext,
        manual_seed=_GENERATOR.manual_seed,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
    )


def _torch_with_a_device(original: ModuleType) -> ModuleType:
    current = {"__getattr__": lambda name: getattr(original.cuda, name)}  # `_cuda`, which is applied with this patch
    return _view(original, cuda=_view(original.cuda, is_available=lambda: True, device_count=lambda: 1, **current))


def _factory_on_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _type_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        name = original(self)
        # Leave a `torch.cuda` type unchanged: some of Transformer Engine's fp8 tensors already report one.
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_


def _with_own_generator(original: Callable[..., None]) -> Callable[..., None]:
    """Let data loaders draw from a generator of their own, as on a GPU.

    On a CPU, torch's default generator takes the role of the device's generator. If loaders drew from it, dropout would
    depend on which tensor rank reads the data, and would change in a resumed run, which starts the loaders again.
    """

    @functools.wraps(original)
    def __init__(self: Any, loader: Any) -> None:
        if loader.generator is None:
            loader.generator = torch.Generator().manual_seed(_GENERATOR.initial_seed())
        original(self, loader)

    return __init__


def _exact_l2_norm(
    chunk_size: Any, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: Any
) -> tuple[torch.Tensor, None]:
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in tensor_lists[0]]
    return torch.stack(squares).sum().sqrt().float().view(1), None


def checkpoint_writer(*args: Any) -> None:
    """Run the loop of Megatron's process for asynchronous checkpoints, without selecting a device.

    This spawned process starts without our patches, and it imports this function by name.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        PersistentAsyncCaller.async_loop(*args)


def copied_tensors(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Copy tensors for an asynchronous save. The process that writes them imports this function by name."""
    return [
        (file, key, (others, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (others, tensors) in write_buckets
    ]


def _sizes_as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts of different sizes, synchronously: each rank in turn broadcasts its part."""

    @functools.wraps(original)
    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return original(parts, own, group=group, async_op=async_op)
        parts[dist.get_rank(group)].copy_(own)
        for owner, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=owner)
        return None

    return all_gather


def _reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], *, group: Any) -> None:
    """Sum parts of any sizes, synchronously: each rank in turn receives its sum."""
    for owner, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if owner == dist.get_rank(group):
            output.copy_(total)


def _stays(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return self


def _unrecorded(self: torch.Tensor, stream: Any) -> None:
    pass


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return _GENERATOR.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    _GENERATOR.set_state(new_state)


def _no_architecture() -> int:
    return 0
