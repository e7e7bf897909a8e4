"""Patches Megatron for machines without Transformer Engine, without Apex, or without a compiler for its index helpers.

For all but one of the patches for Transformer Engine, we tested that Megatron fails without the patch. Without the
warm-up patch, a job merely starts later.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_vp.mcore.settled import process
from megatron_vp.vocab.operations import operations_for


def _norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel and not process.counts_engine:
            return original(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False
        # A replay with --shapes-only builds PyTorch's norms in place of Transformer Engine's. PyTorch's norms refuse
        # zero-centered weights.
        whole.layernorm_zero_centered_gamma &= not process.counts_engine
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


def accumulate_product(rows_ni: torch.Tensor, output_gradient_no: torch.Tensor, main_grad_oi: torch.Tensor) -> None:
    """Add the product output_gradient^T @ rows to main_grad. Both factors may have several leading dimensions.

    With PyTorch 2.10 or newer, a GPU adds the product of 16-bit factors to an fp32 `main_grad` in one GEMM. Older
    versions of PyTorch round the product to 16 bits before they add it.
    """
    rows_ni, output_gradient_no = rows_ni.flatten(0, -2), output_gradient_no.flatten(0, -2)
    operations_for(rows_ni).add_product_(main_grad_oi, output_gradient_no, rows_ni)


def _compile_only_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def _never(module: Any) -> bool:
    return False


def _no_warm_up(tp_size: int | None = None) -> None:
    pass


_AVAILABLE = True
_ACCUMULATION = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate_product, wgrad_gemm_accum_fp16=accumulate_product)
"""Stands in for Apex's extension, which has one function for an fp32 main_grad and one for a 16-bit main_grad; ours
handles both. Megatron's linear layers use the extension, including its vocabulary layers: without it, Megatron builds
them only if fused accumulation is switched off, also in Transformer Engine's layers, which do not need Apex.
"""
