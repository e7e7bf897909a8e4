"""Transformer Engine's quantised tensors on the CPU: one scale per tensor, in PyTorch's own fp8 dtypes.

Transformer Engine's own Python code decides what is quantised, when, and with which scale. This module scales, rounds
and transposes tensors, and converts them to fp32 for a product. Rounding is to the nearest, as on a device. A device
multiplies fp8 operands exactly and sums in at least fp32, so the conversion to fp32 loses nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.mcore import engine_blocks, engine_fp4

E4M3, E5M2 = 7, 8
"""The formats by their numbers in the compiled module."""
_FORMATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A 16-bit tensor in fp32; any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def dense(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The values of an operand of a product, read from the copy that a device of 9.0 would read."""
    if engine_fp4.is_fp4(tensor):
        return engine_fp4.dense(tensor, columnwise)
    if engine_blocks.has_blocks(tensor):
        return engine_blocks.dense(tensor, columnwise)
    if not hasattr(tensor, "_fp8_dtype"):
        return tensor
    kind = _FORMATS[int(tensor._fp8_dtype)]
    if not columnwise:
        return tensor._data.view(kind).float() * tensor._scale_inv
    assert not tensor._transpose_invalid
    last, *others = tensor._transpose.shape
    return (tensor._transpose.view(kind).float() * tensor._scale_inv).flatten(1).t().reshape(*others, last)


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """The tensor times its scale in fp8, row-wise, column-wise or both, as the quantizer asks.

    Under delayed scaling the scale is the quantizer's, which remembers the largest magnitude. Under current scaling
    the largest magnitude becomes the format's.
    """
    if engine_fp4.is_fp4(quantizer):
        return engine_fp4.quantize(tensor, quantizer, output)
    if engine_blocks.has_blocks(quantizer):
        return engine_blocks.quantize(tensor, quantizer, output)
    kind = _FORMATS[int(quantizer.dtype)]
    largest = torch.finfo(kind).max
    values = tensor.detach().float()
    amax = (values.abs().max() if values.numel() else torch.tensor(0.0)).reshape(1)
    if type(quantizer).__name__ == "Float8Quantizer":
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
        scale = quantizer.scale.reshape(1).clone()
    else:
        assert type(quantizer).__name__ == "Float8CurrentScalingQuantizer", "only one scale per tensor has a stand-in"
        amax = _over_tensor_ranks(amax, quantizer)
        scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    data = (values * scale).clamp(-largest, largest).to(kind).view(torch.uint8)
    rows = data if quantizer.rowwise_usage else None
    columns = fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None
    if output is not None:
        # Into the memory that is there: a weight's is a part of a buffer.
        output._data = _into(output._data, rows)
        output._transpose, output._transpose_invalid = columns, columns is None
        output._scale_inv.copy_(scale.reciprocal().reshape(output._scale_inv.shape))
        return output
    return _made(quantizer, list(tensor.shape), tensor.dtype, rows, columns, scale.reciprocal())


def _into(memory: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    return rows if memory is None or rows is None else memory.copy_(rows.reshape(memory.shape))


def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """The largest magnitude; of nothing it is 0."""
    amax.copy_(tensor.abs().max() if tensor.numel() else torch.tensor(0.0))


def multi_tensor_compute_scale_and_scale_inv(_chunk, _noop, tensor_lists, largest, powers_of_2, epsilon):
    """From (largest magnitudes, scales, their reciprocals): those by which a magnitude becomes the format's largest."""
    assert not epsilon
    for amax, scale, reciprocal in zip(*tensor_lists, strict=True):
        scale.copy_(torch.where(amax > 0, largest / amax, torch.ones_like(amax)))
        if powers_of_2:
            scale.copy_(torch.exp2(torch.floor(torch.log2(scale))))
        reciprocal.copy_(scale.reciprocal())


def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    """A quantised tensor whose values are yet to come."""
    if engine_fp4.is_fp4(quantizer):
        return engine_fp4.quantize(torch.zeros(shape, dtype=dtype), quantizer)
    if engine_blocks.has_blocks(quantizer):
        return engine_blocks.quantize(torch.zeros(shape, dtype=dtype), quantizer)
    data = torch.zeros(shape, dtype=torch.uint8)
    columns = fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None
    return _made(quantizer, shape, dtype, data if quantizer.rowwise_usage else None, columns, torch.ones(1))


def split_quantize(tensor: torch.Tensor, sizes: list[int], quantizers: list[Any], **_: object) -> list[Any]:
    """Rows of a tensor, an expert's each, every part by its own quantizer."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(sizes), quantizers, strict=True)]


def fused_multi_row_padding(rows: torch.Tensor, out: torch.Tensor, sizes: list[int], padded: list[int]) -> None:
    """Every expert's rows with zeros behind them, up to a number that the format's products take."""
    for part, place in zip(rows.split(sizes), out.split(padded), strict=True):
        place.zero_()[: len(part)] = part


def fused_multi_row_unpadding(rows: torch.Tensor, out: torch.Tensor, padded: list[int], sizes: list[int]) -> None:
    """Every expert's rows without the zeros."""
    for part, place in zip(rows.split(padded), out.split(sizes), strict=True):
        place.copy_(part[: len(place)])


def _made(quantizer: Any, shape: list[int], dtype: torch.dtype, rows: Any, columns: Any, scale_inv: Any) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    parts = {
        "data": rows,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": columns,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        storage = _storage()
        nominal = "fake_dtype" in inspect.signature(storage.__new__).parameters
        return storage(**parts, **({"fake_dtype": dtype} if nominal else {}))
    return Float8Tensor(shape=shape, dtype=dtype, requires_grad=False, **parts)


def _storage() -> type:
    """Of a quantised tensor that no one but Transformer Engine sees; 2.8 has it under another name."""
    try:
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    except ImportError:
        from transformer_engine.pytorch.tensor._internal.float8_tensor_base import Float8TensorBase

        return Float8TensorBase
    return Float8TensorStorage


def _over_tensor_ranks(amax: torch.Tensor, quantizer: Any) -> torch.Tensor:
    if getattr(quantizer, "with_amax_reduction", False):
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return amax


def bgrad_quantize(gradient: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """The bias's gradient in the gradient's dtype, and the quantised gradient."""
    return wide(gradient).flatten(0, -2).sum(0).to(gradient.dtype), quantize(gradient, quantizer)


def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[..., k] to [k, ...]: the last dimension becomes the first."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None or out.shape != turned.shape else out.copy_(turned)


FUNCTIONS = (
    *engine_blocks.FUNCTIONS,
    *(quantize, bgrad_quantize, fp8_transpose, create_empty_quantized_tensor, split_quantize),
    *(fused_multi_row_padding, fused_multi_row_unpadding),
    *(compute_amax, multi_tensor_compute_scale_and_scale_inv),
)
