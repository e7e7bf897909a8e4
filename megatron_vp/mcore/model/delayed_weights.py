"""Splits the backward of Transformer Engine's layers, by means of Transformer Engine's delayed weight gradients.

With `delay_wgrad_compute`, the backward of a Transformer Engine layer puts the operands of its weight gradient into the
layer's queue. Megatron empties these queues within the same microbatch, through `backward_dw` and the hooks of its DDP
wrapper. Under our schedules, pass W may run several microbatches later. Pass B therefore takes the operands out of the
queues and keeps them for W. In pass W, our code accumulates the gradients and reports to Megatron that they are ready,
as for local layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_vp.mcore.settled import process

MINIMUM_VERSION = "2.8"
"""Oldest Transformer Engine version with which Megatron allows delayed weight gradients together with overlapped
gradient reduction.
"""


def whole_sequence(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Join the tensor ranks' parts of a sequence along the first dimension; without a group, return `part` itself."""
    return part if group is None else gather_from_sequence_parallel_region(part, group=group)


@torch.no_grad()
def accumulate(
    layer: torch.nn.Module,
    operands: list[Any],
    product: Callable[..., tuple[Any, ...]],
    sequence_group: dist.ProcessGroup | None,
) -> None:
    """Add the gradients of one layer and microbatch to `main_grad`, in pass W.

    Args:
        operands, product: what the layer queued: operands and the function that multiplies them. The function returns
            the gradients of weight and bias. The bias gradient is None or empty if autograd computes it; with fused
            accumulation, the weight gradient is already in `main_grad`. For a layer of grouped experts, both gradients
            are lists with one entry per expert, and the third operand receives the weight gradients.
        sequence_group: the ranks that hold the other parts of the sequence, if the input is only this rank's part.
    """
    fused, weights = layer.fuse_wgrad_accumulation, _parameters(layer, "weight")
    if _is_group(layer):
        inputs, output_gradients, gradients = operands
        if not fused:
            # `empty_like` would return an fp8 tensor for an fp8 weight, whatever dtype is requested.
            gradients = [torch.empty(each.shape, dtype=layer.activation_dtype, device=each.device) for each in weights]
        _, bias_gradients, *_ = product(inputs, output_gradients, gradients)
    else:
        layer_input, output_gradient = operands
        layer_input = whole_sequence(layer_input, sequence_group)
        gradients, bias_gradients = ([each] for each in product(layer_input, output_gradient))
    if not fused:
        for weight, gradient in zip(weights, gradients, strict=True):
            if weight.requires_grad:
                weight.main_grad.add_(gradient)
    for bias, gradient in zip(_biases(layer), bias_gradients, strict=False):
        if bias.requires_grad and gradient is not None and gradient.numel():
            bias.main_grad.add_(gradient)


def delaying_layers(chunk: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The layers of a chunk that queue the operands of their weight gradients."""
    return tuple(
        module
        for module in chunk.modules()
        if getattr(module, "wgrad_store", None) is not None and module.wgrad_store.delay_wgrad_compute()
    )


def leave_out_hooks(chunk: torch.nn.Module) -> None:
    """Keep Megatron's DDP wrapper from registering autograd hooks on weights and biases with delayed gradients.

    Transformer Engine's layers set `skip_backward_post_hook` on their parameters, but the biases lose this attribute if
    Megatron initialises on the CPU, because CPU initialisation replaces the biases.
    """
    for layer in delaying_layers(chunk):
        for parameter in _weights_and_biases(layer):
            parameter.skip_backward_post_hook = True


@torch.no_grad()
def take_delayed(layers: Iterable[torch.nn.Module], w_is_late: bool) -> list[Callable[[], None]]:
    """Take the operands from the layers' queues after a backward, and add autograd's gradients to `main_grad`. Return
    the functions that pass W calls.

    Autograd computes the gradient of a bias that is added outside its layer. The `grad` of a weight is a dummy tensor
    if pass W will write to `main_grad` directly. Otherwise it is None or, for grouped experts, an uninitialised buffer
    as large as the weight. The buffer is freed here, because pass W allocates another one.

    The row-wise copies of quantised operands are freed, because only the input gradient needed them. If other passes
    run between B and W (`w_is_late`), only this rank's part of an input that was gathered over the tensor ranks is
    kept, and W gathers the input again.
    """
    taken = []
    for layer in layers:
        in_group = _is_group(layer)
        while not layer.wgrad_store.context.empty():
            operands, product = layer.wgrad_store.context.get()
            operands = [*map(_kept, operands[:2]), *operands[2:]]
            if in_group and not layer.fuse_wgrad_accumulation:
                operands[2] = None
            group = _sequence_group(layer, operands[0]) if w_is_late else None
            if group is not None:
                operands[0] = operands[0].chunk(group.size())[group.rank()].clone()
            taken.append(partial(accumulate, layer, operands, product, group))
        for parameter in _biases(layer) if in_group else _weights_and_biases(layer):
            if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
                parameter.main_grad.add_(parameter.grad)
        for parameter in _weights_and_biases(layer):
            parameter.grad = None
    return taken


def _kept(operand: Any) -> Any:
    """Keep of an operand what pass W needs: no autograd graph, which would keep the chunk's input and its gradient in
    memory, and of a quantised operand only the column-wise copy.
    """
    if isinstance(operand, list):
        return [_kept(each) for each in operand]
    if isinstance(operand, torch.Tensor):
        return operand if operand.grad_fn is None else operand.detach()
    if hasattr(operand, "update_usage"):
        operand.update_usage(rowwise_usage=False, columnwise_usage=True)
    return operand


def _sequence_group(layer: torch.nn.Module, layer_input: Any) -> dist.ProcessGroup | None:
    """The tensor ranks over which a layer gathered its input; None if the input was not gathered or is quantised.

    Quantised inputs are kept whole until W. They take only one byte per element, and gathering them again might also
    involve their scales, because each rank quantises its own part.
    """
    gathered = layer.sequence_parallel and layer.parallel_mode == "column" and not _is_group(layer)
    return layer.tp_group if gathered and isinstance(layer_input, torch.Tensor) else None


def _is_group(layer: torch.nn.Module) -> bool:
    """Whether the layer holds one weight per expert and multiplies by all of them in one call."""
    return hasattr(layer, "num_gemms")


def _parameters(layer: torch.nn.Module, name: str) -> list[torch.nn.Parameter]:
    names = [f"{name}{expert}" for expert in range(layer.num_gemms)] if _is_group(layer) else [name]
    return [getattr(layer, each) for each in names]


def _biases(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return _parameters(layer, "bias") if layer.use_bias else []


def _weights_and_biases(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return _parameters(layer, "weight") + _biases(layer)


def _delaying(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Set `delay_wgrad_compute` after Megatron's own checks, which accept this setting only together with overlapped
    expert-parallel communication.
    """

    @wraps(original)
    def __post_init__(self: Any) -> None:
        self.delay_wgrad_compute = False
        original(self)
        self.delay_wgrad_compute = not process.plain

    return __post_init__


def delaying(config: Any, on: bool = True) -> AbstractContextManager[Any]:
    """Set `delay_wgrad_compute` in a configuration, only inside this context.

    Megatron-Bridge saves the configuration in checkpoints, and could not load a checkpoint with this setting.
    """
    return mock.patch.object(config, "delay_wgrad_compute", on)
