"""Split backward: B computes input gradients and leaves weight gradients to W.

Megatron's column- and row-parallel layers all compute through one function. Under a schedule with W passes it is
replaced by a product whose weight has no edge in autograd's graph: pass B computes the gradients of inputs, biases and
norms, and keeps every weight's (input, output gradient); pass W multiplies them into `main_grad`. Transformer Engine's
layers do so by themselves (`megatron_vp.mcore.model.delayed_weights`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_vp.mcore.model.delayed_weights import take_delayed
from megatron_vp.mcore.model.sequence import whole_sequence
from megatron_vp.mcore.patches import Patch, Variant
from megatron_vp.vocab.operations import operations_for


class PendingGradient(Protocol):
    """The part of one layer's backward for one microbatch that pass B leaves to W.

    parameters: those whose gradient is complete once every microbatch has been accumulated.
    """

    parameters: tuple[torch.nn.Parameter, ...]

    def accumulate(self) -> None:
        """Add the gradients to `main_grad`."""


@dataclass(frozen=True)
class PendingWeightGradient:
    """The data of pass W for one linear layer and microbatch: weight [o, i], input [..., i], output gradient [..., o].

    With sequence parallelism the input is this rank's part of the sequence; the ranks of `tensor_group` hold the
    others.
    """

    weight: torch.nn.Parameter
    layer_input: torch.Tensor
    output_gradient: torch.Tensor
    tensor_group: dist.ProcessGroup | None

    @property
    def parameters(self) -> tuple[torch.nn.Parameter]:
        """The weight; a bias has its gradient from pass B."""
        return (self.weight,)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the weight's gradient to its `main_grad`.

        The GEMM runs in the model's dtype; on a GPU it adds to an fp32 `main_grad` itself, as with Apex in Megatron.
        """
        rows_ni = whole_sequence(self.layer_input, self.tensor_group).flatten(0, -2)
        operations_for(rows_ni).add_product_(self.weight.main_grad, self.output_gradient.flatten(0, -2), rows_ni)


_collected: list[PendingGradient] | None = None


def backward_without_weights(
    backward: Callable[[], Any], delaying: Iterable[torch.nn.Module], w_is_late: bool
) -> list[PendingGradient]:
    """Run a backward through layers, some of which delay weight gradients; return those left for pass W.

    `w_is_late`: other passes run before that W, so a gathered input is kept in parts; see `take_delayed`.
    """
    global _collected
    assert _collected is None, "a backward inside a backward"
    _collected = pending = []
    try:
        backward()
    finally:
        _collected = None
    return pending + take_delayed(delaying, w_is_late)


@dataclass(frozen=True)
class _Layer:
    """A linear layer's weight and tensor parallelism, as Megatron's function has them.

    `sum_group` adds the tensor ranks' dX; with `sequence_group` X is a part of the sequence, Y whole, dX the part's.
    """

    weight: torch.nn.Parameter
    sum_group: dist.ProcessGroup | None
    sequence_group: dist.ProcessGroup | None


class _InputGradientLinear(torch.autograd.Function):
    """Y = X W^T + b. The backward returns dX and db, and keeps (W, X, dY) for pass W.

    W comes in a `_Layer`, in which autograd does not see it: a parameter that is an input would have its hooks called
    in the backward, where Megatron's overlapped gradient reduction asks for a gradient.
    """

    @staticmethod
    def forward(ctx: Any, layer_input: torch.Tensor, bias: torch.Tensor | None, layer: _Layer) -> torch.Tensor:
        ctx.save_for_backward(layer_input)
        ctx.layer = layer
        output = whole_sequence(layer_input, layer.sequence_group) @ layer.weight.detach().t()
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (layer_input,) = ctx.saved_tensors
        layer = ctx.layer
        assert _collected is not None, "a backward of a split schedule outside its pass B"
        # Detached, because its graph would keep the chunk's input and that one's gradient until W.
        pending = PendingWeightGradient(layer.weight, layer_input.detach(), output_gradient, layer.sequence_group)
        _collected.append(pending)
        bias_gradient = output_gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        input_gradient = output_gradient @ layer.weight.detach()
        if layer.sum_group is not None:
            dist.all_reduce(input_gradient, group=layer.sum_group)
        if layer.sequence_group is not None:
            part = torch.empty_like(layer_input)
            dist.reduce_scatter_tensor(part, input_gradient, group=layer.sequence_group)
            input_gradient = part
        return input_gradient, bias_gradient, None


def _split_linear(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def linear(
        input: torch.Tensor,  # Megatron calls it by this name
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *args: Any,
        tp_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(weight, torch.nn.Parameter) or not weight.requires_grad:
            settings = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
            return original(input, weight, bias, *settings, *args, tp_group=tp_group, **kwargs)
        # An input without gradient would end the graph here, and with it the weight's gradient.
        if torch.is_grad_enabled() and not input.requires_grad:
            input = input.detach().requires_grad_()
        layer = _Layer(weight, tp_group if allreduce_dgrad else None, tp_group if sequence_parallel else None)
        return _InputGradientLinear.apply(input, bias, layer)

    return linear


PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
        _split_linear,
        "leave weight gradients of local layers to pass W",
        "(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
        "grad_output_buffer=None, wgrad_deferral_limit=0, tp_group=None, gtp_remat_size=1)",
        {
            # output_dtype is that of --output-logit-dtype, which no schedule of ours runs.
            "0.20": Variant(
                "(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
                "grad_output_buffer=None, wgrad_deferral_limit=0, tp_group=None, gtp_remat_size=1, output_dtype=None)"
            )
        },
    ),
)
"""Applied with a --pipeline-schedule whose backward is split."""
