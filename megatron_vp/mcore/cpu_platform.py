"""Patches that the platform needs: unmodified Megatron without CUDA, over gloo, and without Transformer Engine.

Three groups, by when they are needed. WHEEL_PATCHES: always, because the wheel as shipped cannot start. LOCAL_PATCHES:
where Transformer Engine is not installed, on GPUs too. PATCHES: where no CUDA device is used. Each was found necessary
by leaving it out; `torch.cuda.is_available` is overridden while Megatron initialises and never longer, because
Megatron's checkpointing and torch's compiler ask it in earnest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megatron_vp.mcore.patches import Patch

_CPU = torch.device("cpu")


class _Stream:
    """Stands for a CUDA stream where everything runs in program order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = _CPU

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record_event = _nothing

    def query(self) -> bool:
        return True


class _Event(_Stream):
    """Stands for a CUDA event: it has always happened."""

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
        return original(self).replace("torch.", "torch.cuda.", 1)

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


def _compile_only_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def _norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = original(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
            parameter.sequence_parallel = True
        return norm

    return new


def _torch_norm(original: type) -> Callable[..., torch.nn.Module]:
    def norm(config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> torch.nn.Module:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return WrappedTorchNorm(config, hidden_size, eps)

    return norm


def _with_adam_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any = None, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        if is_loading and isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if not self.optimizer.state[parameter]:
                        self.optimizer.state[parameter] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }
        return original(self, model_sharded_state_dict or {}, is_loading, **kwargs)

    return sharded_state_dict


def _without_step_tensor(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    @torch.no_grad()
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        original(self, model_param, {**tensors, "step": None})

    return set_states


def _own_step_per_parameter(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    return load_state_dict


def _exact_l2_norm(
    chunk_size: Any, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: Any
) -> tuple[torch.Tensor, None]:
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in tensor_lists[0]]
    return torch.stack(squares).sum().sqrt().float().view(1), None


def _always(replacement: Any) -> Callable[[Any], Any]:
    return lambda _original: replacement


WHEEL_PATCHES = (
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        _compile_only_if_missing,
        "the wheel holds the compiled index helpers but no Makefile: compiling them again ends the job",
        "()",
    ),
)

_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

LOCAL_PATCHES = (
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        _norm_under_sequence_parallelism,
        "torch's norms work under sequence parallelism once their gradients are marked for the reduction",
        "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
        "normalization='LayerNorm')",
    ),
    Patch(
        "megatron.core.models.hybrid.hybrid_block:TENorm",
        _torch_norm,
        "a hybrid model's final norm is Transformer Engine's whatever its layers are",
        "(config, hidden_size, eps=1e-05, has_residual=False)",
    ),
    Patch(
        f"{_DISTRIBUTED_OPTIMIZER}.sharded_state_dict",
        _with_adam_state,
        "loading reads the step from Adam's state, which a fresh torch Adam does not have yet",
        "(self, model_sharded_state_dict={}, is_loading=False, sharding_type=None, metadata=None)",
    ),
    Patch(
        f"{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states",
        _without_step_tensor,
        "a step tensor per parameter is asked for, but the step is stored with the group; leaves are written into",
        "(self, model_param, tensors)",
    ),
    Patch(
        f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict",
        _own_step_per_parameter,
        "one step tensor shared by all parameters would count every parameter's update",
        "(self, state_dict)",
    ),
)

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
        Patch(f"torch:{name}", _factory_on_cpu, "Megatron asks for tensors on device 'cuda', or pinned", "builtin")
        for name in _FACTORIES
    ),
    Patch(
        "torch:Tensor.cuda",
        _always(lambda self, *_args, **_kwargs: self),
        "batches and parameters are moved to the device by name",
        "builtin",
    ),
    Patch("torch:Tensor.type", _type_as_cuda, "the optimizers tell dtypes apart by 'torch.cuda.*' names", "builtin"),
    Patch(
        "torch.cuda:current_device",
        _always(lambda: _CPU),
        "its result is passed on as a device everywhere",
        "()",
    ),
    Patch("torch.cuda:set_device", _always(lambda device: None), "there is no device to select", "(device)"),
    Patch(
        "torch.cuda:synchronize",
        _always(lambda device=None: None),
        "timers and point-to-point links wait for the device",
        "(device=None)",
    ),
    Patch(
        "torch.cuda:Stream",
        _always(_Stream),
        "data-parallel wrapping runs on a side stream",
        "(device=None, priority=0, **kwargs)",
    ),
    Patch(
        "torch.cuda:Event",
        _always(_Event),
        "streams are ordered by events",
        "(enable_timing=False, blocking=False, interprocess=False, external=False)",
    ),
    Patch(
        "torch.cuda:current_stream",
        _always(lambda device=None: _Stream()),
        "side streams wait for the current one",
        "(device=None)",
    ),
    Patch(
        "torch.cuda:default_stream",
        _always(lambda device=None: _Stream()),
        "side streams wait for the default one",
        "(device=None)",
    ),
    Patch(
        "torch.cuda:stream",
        _always(lambda stream: contextlib.nullcontext(stream)),
        "code under a side stream runs in order instead",
        "(stream)",
    ),
    Patch(
        "torch.cuda:get_rng_state",
        _always(lambda device="cuda": torch.default_generator.get_state()),
        "checkpoints store the device generator; here it is the CPU's",
        "(device='cuda')",
    ),
    Patch(
        "torch.cuda:set_rng_state",
        _always(lambda new_state, device="cuda": torch.default_generator.set_state(new_state)),
        "checkpoints restore the device generator; here it is the CPU's",
        "(new_state, device='cuda')",
    ),
    Patch(
        "torch.cuda:manual_seed",
        _always(lambda seed: torch.default_generator.manual_seed(seed)),
        "the parallel random states are seeded on the device",
        "(seed)",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        _always(lambda device="cuda", clone=False, graph_safe=False: torch.default_generator.get_state()),
        "the random state tracker saves the device generator",
        "(device='cuda', clone=False, graph_safe=False)",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        _always(lambda new_state, device=-1, graph_safe=False: torch.default_generator.set_state(new_state)),
        "the random state tracker restores the device generator",
        "(new_state, device=-1, graph_safe=False)",
    ),
    Patch(
        "megatron.training.arguments:get_device_arch_version",
        _always(lambda: 0),
        "tensor parallelism asks for the GPU generation",
        "()",
    ),
    *(
        Patch(
            f"{module}:initialize_megatron",
            _pretend_cuda,
            "initialisation insists on CUDA, and builds the parallel groups only where it counts a device",
            _INITIALIZE,
        )
        for module in ("megatron.training.initialize", "megatron.training.training", "megatron.training")
    ),
    Patch(
        "megatron.core.optimizer.clip_grads:l2_norm_impl",
        _always(_exact_l2_norm),
        "torch's fp32 norm on CPU is off by 1e-3 on a million elements: clipping would depend on how weights are split",
        "(chunk_size, noop_flag, tensor_lists, per_tensor, *args)",
    ),
    Patch(
        "megatron.training.training:set_jit_fusion_options",
        _always(lambda tp_size=None: None),
        "the fusion warm-up draws random numbers from the generator that initialises the weights",
        "(tp_size=None)",
    ),
)
