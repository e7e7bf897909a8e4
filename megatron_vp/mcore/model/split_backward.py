"""Split backward: B computes input gradients and leaves weight gradients to W.

In Megatron, all column- and row-parallel layers call one function for their matrix product. For a schedule with W
passes, a patch replaces this function by one that hides the weight from autograd. Pass B computes the gradients of
inputs, biases and norms, and keeps (input, output gradient) for every weight; pass W multiplies the two and adds the
result to `main_grad`. Transformer Engine's layers can delay weight gradients themselves (see
`megatron_vp.mcore.model.delayed_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region

from megatron_vp.mcore.model.delayed_weights import take_delayed, whole_sequence
from megatron_vp.vocab.operations import operations_for

_collected: list[Callable[[], None]] | None = None
"""The parts of the layers' backwards for one microbatch that pass B leaves to W."""
_in_forward: torch.nn.Module | None = None
"""The chunk that our schedule runs a forward of. Layers of other models must stay as they are."""


@contextmanager
def forward_of(chunk: torch.nn.Module) -> Iterator[None]:
    """Inside this context, `chunk` may run, and its linear layers split their backwards if a schedule has W passes."""
    global _in_forward
    _in_forward = chunk
    try:
        yield
    finally:
        _in_forward = None


def in_forward(chunk: torch.nn.Module) -> bool:
    """Whether our schedule runs a forward of `chunk`."""
    return chunk is _in_forward


@torch.no_grad()
def _accumulate(
    weight: torch.nn.Parameter,
    layer_input: torch.Tensor,
    output_gradient: torch.Tensor,
    tensor_group: dist.ProcessGroup | None,
) -> None:
    """Add the gradient of a weight [o, i], of one microbatch, to its `main_grad`, given the layer's input [..., i] and
    its output gradient [..., o].

    With sequence parallelism, the input is this rank's part of the sequence; the ranks of `tensor_group` hold the other
    parts. The GEMM runs in the model's dtype. On a GPU, the GEMM adds directly to an fp32 `main_grad`, as Megatron does
    through Apex.
    """
    rows_ni = whole_sequence(layer_input, tensor_group).flatten(0, -2)
    operations_for(rows_ni).add_product_(weight.main_grad, output_gradient.flatten(0, -2), rows_ni)


def backward_without_weights(
    backward: Callable[[], Any], delaying: Iterable[torch.nn.Module], w_is_late: bool
) -> list[Callable[[], None]]:
    """Run a backward without the weight gradients of linear layers, and return the functions with which pass W computes
    them.
    `delaying`: the layers that queue their weight gradients. `w_is_late`: whether other passes run between B and W.
    """
    global _collected
    assert _collected is None, "backward_without_weights cannot be nested"
    _collected = pending = []
    try:
        backward()
    finally:
        _collected = None
    return pending + take_delayed(delaying, w_is_late)


def accumulate_collected(delaying: Iterable[torch.nn.Module]) -> None:
    """Inside `backward_without_weights`, compute the weight gradients that the backward has left so far."""
    assert _collected is not None
    _collected.extend(take_delayed(delaying, w_is_late=False))
    accumulate_all(_collected)


def accumulate_all(pending: list[Callable[[], None]]) -> None:
    """Call the functions, and free each layer's tensors before the next layer's weight gradient is computed."""
    pending.reverse()
    while pending:
        pending.pop()()


_Layer = tuple[torch.nn.Parameter, dist.ProcessGroup | None, dist.ProcessGroup | None]
"""A linear layer's weight A and two tensor-parallel groups. The layer computes Y = X A^T + b.

The ranks of the first group all-reduce dX. With the second group, X and dX cover only this rank's part of the sequence,
and Y covers the whole sequence.
"""


class _InputGradientLinear(torch.autograd.Function):
    """Y = X A^T + b, with weight A. The backward returns dX and db, and keeps (A, X, dY) for pass W.

    A is passed inside a `_Layer` to hide it from autograd. Otherwise, the backward would call the hooks of A, and
    Megatron's hook for overlapped gradient reduction would fail, because it expects a gradient.
    """

    @staticmethod
    def forward(ctx: Any, layer_input: torch.Tensor, bias: torch.Tensor | None, layer: _Layer) -> torch.Tensor:
        ctx.save_for_backward(layer_input)
        ctx.layer = layer
        weight, _, sequence_group = layer
        output = whole_sequence(layer_input, sequence_group) @ weight.detach().t()
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (layer_input,) = ctx.saved_tensors
        weight, sum_group, sequence_group = ctx.layer
        assert _collected is not None, "a split backward must run inside pass B"
        # Without `detach`, the autograd graph would keep the chunk's input and its gradient alive until W.
        _collected.append(partial(_accumulate, weight, layer_input.detach(), output_gradient, sequence_group))
        bias_gradient = output_gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        input_gradient = output_gradient @ weight.detach()
        if sum_group is not None:
            dist.all_reduce(input_gradient, group=sum_group)
        if sequence_group is not None:
            input_gradient = reduce_scatter_to_sequence_parallel_region(input_gradient, group=sequence_group)
        return input_gradient, bias_gradient, None


def _split_linear(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(original)
    def linear(
        input: torch.Tensor,  # Megatron passes `input` by keyword, so the name is fixed.
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *args: Any,
        tp_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        ours = _in_forward is not None or _collected is not None  # The backward may repeat a forward.
        if not ours or not isinstance(weight, torch.nn.Parameter) or not weight.requires_grad:
            settings = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
            return original(input, weight, bias, *settings, *args, tp_group=tp_group, **kwargs)
        # If no input required a gradient, autograd would not run this backward, and the weight would get no gradient.
        if torch.is_grad_enabled() and not input.requires_grad:
            input = input.detach().requires_grad_()
        layer = weight, tp_group if allreduce_dgrad else None, tp_group if sequence_parallel else None
        return _InputGradientLinear.apply(input, bias, layer)

    return linear
