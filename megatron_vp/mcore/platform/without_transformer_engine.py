"""Patches Megatron for machines without Transformer Engine.

For all but two of the patches, we tested that Megatron fails without the patch. We did not test `_final_norm` on
machines with Apex, but Megatron's code shows that this patch is needed there. Without the warm-up patch, a job merely
starts later.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.settled import replay


def _norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel and not replay().counts_engine:
            return original(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False
        # A replay with --shapes-only builds PyTorch's norms in place of Transformer Engine's. PyTorch's norms refuse
        # zero-centered weights.
        whole.layernorm_zero_centered_gamma &= not replay().counts_engine
        norm = original(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of parameters with this attribute over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _torch_norm(original: type) -> Callable[..., torch.nn.Module]:
    def norm(config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> torch.nn.Module:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return WrappedTorchNorm(config, hidden_size, eps)

    return norm


def _final_norm(original: Any) -> Any:
    """Use PyTorch's RMSNorm after the last layer if Megatron would use Apex's norms, which include no RMSNorm."""
    if getattr(original, "__name__", None) != "FusedLayerNorm":
        return original

    def norm(config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return (original if config.normalization == "LayerNorm" else WrappedTorchNorm)(config, *args, **kwargs)

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


def _no_warm_up(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def warm_up(tp_size: int | None = None) -> None:
        pass

    return warm_up


_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

NORM_PATCHES = (
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        _norm_under_sequence_parallelism,
        "torch's norms support sequence parallelism if their parameters are marked for Megatron's gradient reduction",
        "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
        "normalization='LayerNorm')",
    ),
)
"""These patches are always applied, because local layers use torch's norms even if Transformer Engine is installed."""

PATCHES = (
    Patch(
        "megatron.core.transformer.transformer_block:LayerNormImpl",
        _final_norm,
        "if Apex is installed, Megatron takes the final norm from Apex, which has no RMSNorm",
        "(config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
        "normalization='LayerNorm') or (config, hidden_size, eps=1e-05, persist_layer_norm=True, "
        "zero_centered_gamma=False, normalization='LayerNorm') or (config, hidden_size, eps=1e-05, has_residual=False)",
    ),
    Patch(
        "megatron.core.models.hybrid.hybrid_block:TENorm",
        _torch_norm,
        "Megatron takes a hybrid model's final norm from Transformer Engine, even if the model's layers are local",
        "(config, hidden_size, eps=1e-05, has_residual=False)",
    ),
    Patch(
        f"{_DISTRIBUTED_OPTIMIZER}.sharded_state_dict",
        _with_adam_state,
        "loading reads the step from Adam's state, which a newly created torch Adam does not have yet",
        "(self, model_sharded_state_dict={}, is_loading=False, sharding_type=None, metadata=None)",
    ),
    Patch(
        f"{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states",
        _without_step_tensor,
        "loading expects Adam's step count for every parameter, but checkpoints store it only once per group; loading "
        "also writes into leaf tensors, so it must run without autograd",
        "(self, model_param, tensors)",
    ),
    Patch(
        f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict",
        _own_step_per_parameter,
        "a step tensor that all parameters share would be incremented once for every parameter",
        "(self, state_dict)",
    ),
    Patch(
        "megatron.core.transformer.multi_token_prediction:is_inference_column_parallel_linear",
        lambda original: lambda module: False,
        "a layer for multi-token prediction needs classes that Megatron defines only with Transformer Engine",
        "(module)",
        {"0.19": None},
    ),
)

WARM_UP_PATCHES = (
    Patch(
        "megatron.training.initialize:_warmup_jit_function",
        _no_warm_up,
        "on a GPU, Megatron's warm-up takes minutes to compile fused kernels, which are not used without Transformer "
        "Engine",
        "(tp_size=None)",
    ),
)
