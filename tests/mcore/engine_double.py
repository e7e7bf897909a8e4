"""Stands for Transformer Engine where it is not installed: its linear layers, norms and attention in plain PyTorch.

What Megatron's wrappers and pass W rely on is kept as Transformer Engine 2.8's source has it: the constructor's names,
`wgrad_store` with a queue of (operands, product), the product's two results, main_grad written by the product when
accumulation is fused (and overwritten in the first microbatch), the dummy gradient that the backward then returns, and
biases that are returned instead of added.
"""

from __future__ import annotations

import queue
import sys
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch.nn import functional

VERSION = "2.8.0"
fuses_accumulation = False
"""Have the layers write to main_grad themselves, whatever Megatron says: its own layers cannot without Apex."""


class WeightGradStore:
    """As in `transformer_engine.pytorch.module._common`."""

    def __init__(self, delay_wgrad_compute: bool) -> None:
        self.context = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list, func) -> None:
        self.context.put([tensor_list, func])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer_input, weight, bias, module, is_first_microbatch):
        ctx.save_for_backward(layer_input)
        ctx.weight, ctx.bias, ctx.module, ctx.is_first = weight, bias, module, bool(is_first_microbatch)
        return functional.linear(layer_input, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        (layer_input,) = ctx.saved_tensors
        module, weight, bias, is_first = ctx.module, ctx.weight, ctx.bias, ctx.is_first
        fused = module.fuse_wgrad_accumulation

        def product(x, dy):
            dw = dy.flatten(0, -2).t() @ x.flatten(0, -2)
            if fused:
                weight.main_grad.copy_(dw) if is_first else weight.main_grad.add_(dw)
                dw = weight.main_grad
            return dw, None if bias is None else dy.flatten(0, -2).sum(0)

        weight_gradient = bias_gradient = None
        if module.wgrad_store.delay_wgrad_compute():
            module.wgrad_store.put([layer_input, gradient], product)
        else:
            weight_gradient, bias_gradient = product(layer_input, gradient)
        if fused:
            weight.grad_added_to_main_grad = True
            weight_gradient = torch.full_like(weight, torch.nan)
        return gradient @ weight, weight_gradient, bias_gradient, None, None


class Linear(torch.nn.Module):
    """Y = X W^T + b, or (X W^T, b) with `return_bias`."""

    def __init__(
        self,
        in_features,
        out_features,
        *,
        init_method,
        bias,
        return_bias,
        params_dtype,
        fuse_wgrad_accumulation,
        delay_wgrad_compute=False,
        **_,
    ) -> None:
        super().__init__()
        self.use_bias, self.apply_bias = bias, bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation or fuses_accumulation
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.weight = torch.nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype))
        init_method(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
        if delay_wgrad_compute:
            for parameter in self.parameters():
                parameter.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook) -> None:
        """Called by Megatron's data parallelism; the hooks run in `backward_dw`."""

    def forward(self, layer_input, is_first_microbatch=None):
        bias = self.bias if self.apply_bias else None
        output = _Product.apply(layer_input, self.weight, bias, self, is_first_microbatch)
        return (output, self.bias) if self.use_bias and not self.apply_bias else output


class LayerNormLinear(Linear):
    """A norm before the product; the norm's gradients are autograd's."""

    def __init__(self, in_features, out_features, *, eps, normalization, params_dtype, **options) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **options)
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=params_dtype))

    def forward(self, layer_input, is_first_microbatch=None):
        weight = self.layer_norm_weight
        if self.normalization == "RMSNorm":
            normed = functional.rms_norm(layer_input, weight.shape, weight, self.eps)
        else:
            normed = functional.layer_norm(layer_input, weight.shape, weight, self.layer_norm_bias, self.eps)
        return super().forward(normed, is_first_microbatch)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, normalized_shape, eps, sequence_parallel, zero_centered_gamma, params_dtype, device=None):
        super().__init__(normalized_shape, eps, dtype=params_dtype)


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, normalized_shape, eps, sequence_parallel, zero_centered_gamma, params_dtype, device=None):
        super().__init__(normalized_shape, eps, dtype=params_dtype)


class DotProductAttention(torch.nn.Module):
    """Causal attention, [s, b, heads, d] to [s, b, heads d]."""

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups, **_) -> None:
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


class _Module(ModuleType):
    """Names that Megatron only imports are empty classes."""

    def __init__(self, name: str, **contents: object) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(self).update(contents)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def install() -> None:
    """Put the double where `import transformer_engine` finds it; before Megatron is imported."""
    layers = (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention)
    modules = {
        name: _Module(f"transformer_engine.pytorch.{name}") for name in ("fp8", "distributed", "router", "tensor")
    }
    modules["fp8"].fp8_autocast = modules["fp8"].fp8_model_init = lambda **_: nullcontext()
    pytorch = _Module("transformer_engine.pytorch", **modules, **{layer.__name__: layer for layer in layers})
    common = _Module("transformer_engine.common", recipe=_Module("transformer_engine.common.recipe"))
    root = _Module("transformer_engine", pytorch=pytorch, common=common, __version__=VERSION)
    for module in (root, pytorch, common, common.recipe, *modules.values()):
        sys.modules[module.__name__] = module


@contextmanager
def forgotten(*packages: str):
    """Without what is imported of some packages, so that they are imported anew inside."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name in kept:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(kept)
