"""Patches that let unmodified Megatron run without CUDA, over gloo.

For each patch, we tested that Megatron fails without it. `torch.cuda.is_available` is overridden only while Megatron
initialises, because Megatron's checkpointing and torch's compiler need its true value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.platform import expert_tokens

_CPU = torch.device("cpu")


class _Stream:
    """Replaces a CUDA stream; everything runs in program order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = _CPU

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event(_Stream):
    """Replaces a CUDA event; always reports that the event has completed."""

    record = wait = _Stream._nothing

    def elapsed_time(self, _end: _Event) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _factory_on_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
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


def _pretend_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
        ):
            return original(*args, **kwargs)

    return initialize_megatron


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


class _HostGenerator:
    """Gives data loaders and datasets their own random numbers, as in a run with GPUs.

    On a CPU, torch's default generator also takes the role of the device's generator. If data loaders drew from it,
    dropout would depend on which tensor rank reads the data, and would change in a resumed run, which starts the
    loaders again. Loaders therefore draw from a separate generator, which no checkpoint stores.
    """

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None

    @contextlib.contextmanager
    def from_the_host(self) -> Iterator[None]:
        """Inside this context, give torch's default generator the state of the separate generator for data."""
        default = torch.default_generator
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(default.initial_seed())
        device_state = default.get_state()
        default.set_state(self._generator.get_state())
        try:
            yield
        finally:
            self._generator.set_state(default.get_state())
            default.set_state(device_state)


_HOST = _HostGenerator()


def _on_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        with _HOST.from_the_host():
            return original(*args, **kwargs)

    return drawing


def _bytes_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather fp8 weights as bytes, synchronously."""

    @functools.wraps(original)
    def gather(whole: torch.Tensor, part: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if whole.dtype != torch.uint8:
            return original(whole, part, group=group, async_op=async_op)
        torch.distributed.all_gather(list(whole.chunk(group.size())), part, group=group)
        return None

    return gather


def _parts_of_any_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts of different sizes, synchronously: each rank in turn broadcasts its part."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        for owner, part in enumerate(tensor_list):
            torch.distributed.broadcast(part, group=group, group_src=owner)
        return None

    return all_gather


def _always(replacement: Any) -> Callable[[Any], Any]:
    return lambda _original: replacement


_INITIALIZE = (
    "(allow_no_cuda=False, skip_mpu_initialization=False, get_embedding_ranks=None, get_position_embedding_ranks=None, "
    "store=None, skip_model_parallel_init=False, seed_pp_group=None, seed_dp_group=None, seed_tp_group=None, "
    "seed_ep_group=None, seed_etp_group=None, skip_random_seed=False)"
)
_FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)

PATCHES = (
    *(
        Patch(f"torch:{name}", _factory_on_cpu, "Megatron creates tensors on 'cuda' or in pinned memory", "builtin")
        for name in _FACTORIES
    ),
    Patch(
        "torch:Tensor.cuda",
        _always(lambda self, *_args, **_kwargs: self),
        "Megatron moves batches and parameters to the device with Tensor.cuda",
        "builtin",
    ),
    Patch(
        "torch:Tensor.type",
        _type_as_cuda,
        "Megatron's optimizers compare the result of Tensor.type with names such as torch.cuda.FloatTensor",
        "builtin",
    ),
    Patch(
        "torch.cuda:current_device",
        _always(lambda: _CPU),
        "Megatron passes the result of torch.cuda.current_device to many functions as their device",
        "()",
    ),
    Patch(
        "torch.cuda:set_device",
        _always(lambda device: None),
        "Megatron selects a device, but a CPU run has none",
        "(device)",
    ),
    Patch(
        "torch.cuda:synchronize",
        _always(lambda device=None: None),
        "timers and point-to-point communication wait for the device",
        "(device=None)",
    ),
    Patch(
        "torch.cuda:Stream",
        _always(_Stream),
        "Megatron uses a side stream to wrap models for data parallelism",
        "(device=None, priority=0, **kwargs)",
    ),
    Patch(
        "torch.cuda:Event",
        _always(_Event),
        "Megatron uses events to make streams wait for each other",
        "(enable_timing=False, blocking=False, interprocess=False, external=False)",
    ),
    Patch(
        "torch.cuda:current_stream",
        _always(lambda device=None: _Stream()),
        "Megatron makes side streams wait for the current stream",
        "(device=None)",
    ),
    Patch(
        "torch.cuda:default_stream",
        _always(lambda device=None: _Stream()),
        "Megatron makes side streams wait for the default stream",
        "(device=None)",
    ),
    Patch(
        "torch.cuda:stream",
        _always(lambda stream: contextlib.nullcontext(stream)),
        "code meant for a side stream runs on the main stream, in program order",
        "(stream)",
    ),
    Patch(
        "torch.cuda:get_rng_state",
        _always(lambda device="cuda": torch.default_generator.get_state()),
        "a checkpoint stores the random state of the GPU; in a CPU run, it stores that of the CPU",
        "(device='cuda')",
    ),
    Patch(
        "torch.cuda:set_rng_state",
        _always(lambda new_state, device="cuda": torch.default_generator.set_state(new_state)),
        "loading a checkpoint restores the random state of the GPU; in a CPU run, it restores that of the CPU",
        "(new_state, device='cuda')",
    ),
    Patch(
        "torch.cuda:manual_seed",
        _always(lambda seed: torch.default_generator.manual_seed(seed)),
        "Megatron seeds the device's random number generator",
        "(seed)",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        _always(lambda device="cuda", clone=False, graph_safe=False: torch.default_generator.get_state()),
        "Megatron's random state tracker saves the state of the device's generator",
        "(device='cuda', clone=False, graph_safe=False)",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        _always(lambda new_state, device=-1, graph_safe=False: torch.default_generator.set_state(new_state)),
        "Megatron's random state tracker restores the state of the device's generator",
        "(new_state, device=-1, graph_safe=False)",
    ),
    *(
        Patch(
            f"torch.utils.data.dataloader:{method}",
            _on_the_host,
            "data loaders use the host's random generator, and dropout uses the device's; on a CPU, both would use the "
            "same one",
            "(self)",
        )
        for method in ("DataLoader.__iter__", "_BaseDataLoaderIter.__next__")
    ),
    Patch(
        "megatron.training.arguments:get_device_arch_version",
        _always(lambda: 0),
        "with tensor parallelism, Megatron asks for the architecture of the GPU",
        "()",
    ),
    *(
        Patch(
            f"{module}:initialize_megatron",
            _pretend_cuda,
            "initialization requires CUDA, and creates the parallel groups only if there is a device",
            _INITIALIZE,
        )
        for module in ("megatron.training.initialize", "megatron.training.training", "megatron.training")
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop",
        _always(checkpoint_writer),
        "the process that writes asynchronous checkpoints selects a CUDA device",
        "(rank, queue, preload_q, comp_q, log_level=20, cpu_priority=10, io_priority=None)",
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors",
        _always(copied_tensors),
        "an asynchronous save shares the weights with its writer, so the next step would change what is being written",
        "(write_buckets, non_blocking=True)",
    ),
    *expert_tokens.PATCHES,
    Patch(
        "megatron.core.optimizer.clip_grads:l2_norm_impl",
        _always(_exact_l2_norm),
        "torch's fp32 norm on CPU has a relative error of up to 1e-3 for a million elements, so clipping would depend "
        "on how weights are split",
        "(chunk_size, noop_flag, tensor_lists, per_tensor, *args) or builtin",
    ),
    Patch(
        "megatron.core.distributed.param_and_grad_buffer:dist_all_gather_func",
        _bytes_apart,
        "torch coalesces all-gathers of several buffers, but over gloo, coalescing fp8 and 16-bit weights can corrupt "
        "both",
        "(output_tensor, input_tensor, group=None, async_op=False)",
    ),
    Patch(
        "torch.distributed:all_gather",
        _parts_of_any_size,
        "gloo gathers only tensors of equal size, but with a layer-wise optimizer, replicas update different numbers "
        "of weights",
        "(tensor_list, tensor, group=None, async_op=False)",
    ),
    Patch(
        "megatron.training.training:set_jit_fusion_options",
        _always(lambda tp_size=None: None),
        "the fusion warm-up draws random numbers from the generator that initialises the weights",
        "(tp_size=None)",
    ),
)
