"""Transformer Engine's fp8 tensors with a scale per block on the CPU: `blockwise` (1 or 128 by 128), `mxfp8` (by 32).

Transformer Engine's own Python code decides what is quantised, when, and by which quantizer. Rounding is to the
nearest. A scale is the largest power of two with which all numbers of the block fit the format.
"""

from __future__ import annotations

from typing import Any

import torch

_FORMATS = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
"""By their numbers in the compiled module."""
_ONE = 127
"""The exponent of 1 in a byte that holds an exponent alone."""


def has_blocks(tensor: Any) -> bool:
    """Whether a tensor, or who makes tensors, is of one of these formats."""
    return type(tensor).__name__.startswith(("Float8Blockwise", "Float8BlockQuantizer", "MXFP8"))


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None) -> Any:
    """The tensor row-wise, column-wise or both, as the quantizer asks."""
    shape, matrix = list(tensor.shape), tensor.detach().float().flatten(0, -2)
    parts: dict[str, Any] = {}
    for name, wanted in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        columnwise = name == "columnwise"
        parts[f"{name}_data"] = parts[f"{name}_scale_inv"] = None
        if wanted:
            data, place = _quantised(matrix, quantizer, columnwise, quantizer.get_scale_shape(shape, columnwise))
            turned = columnwise and not _is_mx(quantizer)
            parts[f"{name}_data"] = data.reshape([shape[-1], *shape[:-1]] if turned else shape)
            parts[f"{name}_scale_inv"] = place
    if output is not None:
        for name, part in parts.items():
            old = getattr(output, f"_{name}")
            # Into the memory that is there: a weight's is a part of a buffer.
            setattr(output, f"_{name}", part if old is None or part is None else old.copy_(part))
        return output
    return _made(quantizer, shape, tensor.dtype, parts)


def dense(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The values of an operand of a product."""
    name = "columnwise" if columnwise else "rowwise"
    data, place = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    values = data.view(_FORMATS[int(tensor._fp8_dtype)]).float()
    if _is_mx(tensor):
        matrix = values.flatten(0, -2)
        exponents = place[: _blocks(matrix.shape[0], 32 if columnwise else 1)]
        exponents = exponents[:, : _blocks(matrix.shape[1], 1 if columnwise else 32)]
        scales = torch.exp2(exponents.float() - _ONE)
        return (matrix * _spread(scales, (32, 1) if columnwise else (1, 32), matrix.shape)).reshape(values.shape)
    first, *others = values.shape
    matrix = values.reshape(first, -1) if columnwise else values.flatten(0, -2)
    high, wide = matrix.shape
    if tensor._is_2D_scaled:
        scales, tile = place[:, : _blocks(wide, 128)], (128, 128)
    else:  # the scales of a row are in a column of their place
        scales, tile = place[:, :high].t(), (1, 128)
    matrix = matrix * _spread(scales, tile, matrix.shape)
    return matrix.t().reshape(*others, first) if columnwise else matrix.reshape(values.shape)


def _quantised(
    matrix: torch.Tensor, quantizer: Any, columnwise: bool, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers, and the reciprocals of their scales in a place of the size that the format gives them."""
    kind = _FORMATS[int(quantizer.dtype)]
    if _is_mx(quantizer):
        assert not quantizer.with_2d_quantization
        tile = (32, 1) if columnwise else (1, 32)
        scales = _scales(_largest(matrix, tile), kind)
        place = torch.zeros(size, dtype=torch.uint8)
        place[: scales.shape[0], : scales.shape[1]] = _ONE - torch.log2(scales).round().to(torch.int)
    else:
        matrix = matrix.t() if columnwise else matrix
        tile = (128, 128) if quantizer.block_scaling_dim == 2 else (1, 128)
        assert quantizer.force_pow_2_scales and not quantizer.amax_epsilon
        scales = _scales(_largest(matrix, tile), kind)
        place, kept = torch.zeros(size), scales if quantizer.block_scaling_dim == 2 else scales.t()
        place[: kept.shape[0], : kept.shape[1]] = kept.reciprocal()
    return _rounded(matrix, _spread(scales, tile, matrix.shape), kind), place


def _is_mx(tensor: Any) -> bool:
    return type(tensor).__name__.startswith("MXFP8")


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _largest(matrix: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Of each tile, the largest magnitude."""
    high, wide = (_blocks(size, block) for size, block in zip(matrix.shape, tile, strict=True))
    padded = torch.zeros(high * tile[0], wide * tile[1])
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.abs()
    return padded.reshape(high, tile[0], wide, tile[1]).amax((1, 3))


def _scales(largest: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    room = torch.finfo(kind).max / largest
    return torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(room))), torch.ones_like(largest))


def _spread(scales: torch.Tensor, tile: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """A tile's scale for each of its numbers."""
    return scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]


def _rounded(values: torch.Tensor, scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(kind).max
    return (values * scales).clamp(-largest, largest).to(kind).view(torch.uint8).contiguous()


def _made(quantizer: Any, shape: list[int], dtype: torch.dtype, parts: dict[str, Any]) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    parts |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if _is_mx(quantizer):
        kinds, parts["with_gemm_swizzled_scales"] = (MXFP8TensorStorage, MXFP8Tensor), False
    else:
        kinds = (Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor)
        parts["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if quantizer.internal:
        return kinds[0](**parts, fake_dtype=dtype)
    return kinds[1](shape=shape, dtype=dtype, requires_grad=False, **parts)


# Weights in fp8: what turns masters, of which each replica has a part, into numbers and scales.


def fp8_block_scaling_compute_partial_amax(master, largest, high, wide, start, block):
    """Of each block the largest magnitude in this part of a weight."""
    found = _largest(_part(master, high, wide, start), (block, block))
    largest.zero_()[: found.shape[0], : found.shape[1]] = found


def fp8_block_scaling_partial_cast(master, numbers, scales, high, wide, start, block, dtype):
    """The numbers of this part of a weight."""
    spread = _spread(scales, (block, block), torch.Size((high, wide))).flatten()[start : start + master.numel()]
    numbers.copy_(_rounded(master.flatten().float(), spread, _FORMATS[int(dtype)]))


def _part(master: torch.Tensor, high: int, wide: int, start: int) -> torch.Tensor:
    whole = torch.zeros(high * wide)
    whole[start : start + master.numel()] = master.flatten().float()
    return whole.reshape(high, wide)


def read_in_place(_context: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """In place of Transformer Engine's own reader of mxfp8, which takes a tensor to a device first."""
    return dense(tensor, columnwise=tensor._rowwise_data is None).to(dtype)


FUNCTIONS = (fp8_block_scaling_compute_partial_amax, fp8_block_scaling_partial_cast)
