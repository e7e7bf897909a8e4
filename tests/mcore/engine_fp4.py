"""Transformer Engine's NVFP4 tensors on the CPU: two 4-bit numbers per byte, with an fp8 scale for every 16 numbers.

Transformer Engine's own Python code decides what is quantised, when, and by which quantizer. Weights have one scale per
block of 16 by 16. Operands of weight gradients are first multiplied by the Hadamard matrix of their quantizer.

There is one difference to a device: gradients are rounded to the nearest number, not up or down at random. On a device,
the random numbers are drawn in the order of the passes, so they differ between schedules, as with dropout. Without
them, everything else can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What e2m1 has without its sign, by code."""
_MIDDLES = (_VALUES[1:] + _VALUES[:-1]) / 2
_SCALE = torch.float8_e4m3fn
_LARGEST = 6.0 * 448.0
BLOCK = 16


def is_fp4(tensor: Any) -> bool:
    """Whether a tensor, or who makes tensors, is of this format."""
    return hasattr(tensor, "_fp4_dtype") or type(tensor).__name__ == "NVFP4Quantizer"


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None) -> Any:
    """The tensor in NVFP4, row-wise, column-wise (transposed) or both, as the quantizer asks."""
    values = tensor.detach().float()
    rows, columns = values.flatten(0, -2), values.flatten(0, -2).t().contiguous()
    if quantizer.with_rht:
        rotated = columns.reshape(-1, BLOCK) @ quantizer.rht_matrix.float()
        columns = rotated.reshape(columns.shape).to(tensor.dtype).float()
    parts: dict[str, Any] = {}
    for name, wanted, matrix, shape in (
        ("rowwise", quantizer.rowwise_usage, rows, tensor.shape),
        ("columnwise", quantizer.columnwise_usage, columns, (tensor.shape[-1], *tensor.shape[:-1])),
    ):
        made = _quantised(matrix, quantizer) if wanted else (None, None, None)
        data, parts[f"{name}_scale_inv"], parts[f"amax_{name}"] = made
        parts[f"{name}_data"] = None if data is None else data.reshape(*shape[:-1], shape[-1] // 2)
    if output is not None:
        for name, part in parts.items():
            if part is not None:
                getattr(output, f"_{name}").copy_(part)
        return output
    return _made(quantizer, list(tensor.shape), tensor.dtype, parts)


def _quantised(matrix: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers per byte, the block scales in the place that the format gives them, and the largest magnitude."""
    height, width = matrix.shape
    assert width % BLOCK == 0
    amax = (matrix.abs().max() if matrix.numel() else torch.tensor(0.0)).reshape(1)
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    whole = _whole_scale(amax)
    blocks = matrix.reshape(height, width // BLOCK, BLOCK)
    largest = blocks.abs().amax(-1)
    if quantizer.with_2d_quantization:
        assert height % BLOCK == 0
        largest = largest.reshape(height // BLOCK, BLOCK, -1).amax(1).repeat_interleave(BLOCK, 0)
    scales = _block_scales(largest, whole)
    codes = _codes(blocks, scales.float()[..., None], whole)
    return _packed(codes.reshape(height, width)), padded(scales.view(torch.uint8)), amax


def padded(scales: torch.Tensor) -> torch.Tensor:
    """Scales of blocks in the place that the format gives them: multiples of 128 by 4."""
    height, width = scales.shape
    place = torch.zeros(-(-height // 128) * 128, -(-width // 4) * 4, dtype=torch.uint8)
    place[:height, :width] = scales
    return place


def _whole_scale(amax: torch.Tensor) -> torch.Tensor:
    """That of a whole tensor."""
    return torch.where(amax > 0, _LARGEST / amax, torch.ones_like(amax))


def _block_scales(largest: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return (largest / 6.0 * whole).clamp(max=448.0).to(_SCALE)


def _codes(values: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The nearest numbers' codes, each in a byte. `scales` are the blocks', fp32."""
    scaled = values * torch.where(scales > 0, whole / scales, torch.zeros_like(scales))
    return (torch.bucketize(scaled.abs(), _MIDDLES) + 8 * (scaled < 0)).to(torch.uint8)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


def dense(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The values of an operand of a product. Read column-wise they are turned as `quantize` has turned them."""
    if columnwise:
        first, *others = tensor._columnwise_data.shape
        matrix = _read(
            tensor._columnwise_data.reshape(first, -1), tensor._columnwise_scale_inv, tensor._amax_columnwise
        )
        return matrix.t().reshape(*others[:-1], -1, first)
    shape = tensor._rowwise_data.shape
    matrix = _read(tensor._rowwise_data.reshape(-1, shape[-1]), tensor._rowwise_scale_inv, tensor._amax_rowwise)
    return matrix.reshape(*shape[:-1], -1)


def _read(data: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    height, width = data.shape[0], 2 * data.shape[1]
    codes = _unpacked(data).reshape(height, width // BLOCK, BLOCK).long()
    values = _VALUES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    scales = scale_inv[:height, : width // BLOCK].view(_SCALE).float() * (amax / _LARGEST)
    return (values * scales[..., None]).reshape(height, width)


def _made(quantizer: Any, shape: list[int], dtype: torch.dtype, parts: dict[str, Any]) -> Any:
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    parts |= {"fp4_dtype": quantizer.dtype, "quantizer": quantizer, "with_gemm_swizzled_scales": False}
    if quantizer.internal:
        return NVFP4TensorStorage(**parts, fake_dtype=dtype)
    return NVFP4Tensor(shape=shape, dtype=dtype, requires_grad=False, **parts)


# Weights in fp4: what turns masters, of which each replica has a part, into numbers and scales.


def nvfp4_multi_tensor_compute_partial_amax(masters, tiles, wholes, heights, widths, starts, block):
    """Of each block of 16 by 16, and of the whole, the largest magnitude in this part of a weight."""
    for master, tile, whole, height, width, start in zip(masters, tiles, wholes, heights, widths, starts, strict=True):
        values = torch.zeros(height * width)
        values[start : start + master.numel()] = master.flatten().float().abs()
        tile.copy_(values.reshape(height // block, block, width // block, block).amax((1, 3)))
        whole.copy_(values.max())


def nvfp4_compute_global_scale(amaxes: torch.Tensor, scales: torch.Tensor) -> None:
    """The scales of whole weights."""
    scales.copy_(_whole_scale(amaxes))


def nvfp4_multi_tensor_fused_scale(tiles, wholes, scales, places, amaxes, rows, columns, padded, block):
    """The scales of blocks, also where a tensor keeps them, and the largest magnitude of the whole."""
    for tile, whole, scale, place, amax in zip(tiles, wholes, scales, places, amaxes, strict=True):
        made = _block_scales(tile, _whole_scale(whole))
        scale.copy_(made.float())
        place[: len(tile) * block, : tile.shape[1]] = made.view(torch.uint8).repeat_interleave(block, 0)
        amax.copy_(whole)


def nvfp4_multi_tensor_2d_partial_cast(masters, bytes_, scales, wholes, heights, widths, starts, block):
    """The numbers of this part of a weight. Of a byte that it shares with another part it writes its half."""
    for master, data, scale, whole, width, start in zip(masters, bytes_, scales, wholes, widths, starts, strict=True):
        place = torch.arange(start, start + master.numel())
        of_block = scale[place // width // block, place % width // block]
        codes = _unpacked(data)
        codes[start % 2 :][: master.numel()] = _codes(master.flatten().float(), of_block, whole)
        data.copy_(_packed(codes))


def nvfp4_2d_multi_tensor_transpose(rows, columns, row_scales, column_scales, heights, widths):
    """Numbers and scales of the transposed weights."""
    lists = zip(rows, columns, row_scales, column_scales, heights, widths, strict=True)
    for data, turned, scales, turned_scales, height, width in lists:
        turned.copy_(_packed(_unpacked(data.reshape(height, -1)).t().contiguous()))
        blocks = scales[:height:BLOCK, : width // BLOCK].t().repeat_interleave(BLOCK, 0)
        turned_scales.zero_()[:width, : height // BLOCK] = blocks


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[a, b, ...] becomes [b, a, ...]."""
    turned = tensor.transpose(0, 1).contiguous()
    return turned if out is None else out.copy_(turned)


def read_in_place(_context: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """In place of Transformer Engine's own reader, which takes a tensor to a device first."""
    return dense(tensor, columnwise=False).to(dtype)


def without_joined_messages(torch_: Any) -> Any:
    """PyTorch, whose `torch.distributed._coalescing_manager` leaves every message by itself."""

    @contextmanager
    def each_by_itself(**_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(wait=lambda: None)

    distributed = _Instead(torch_.distributed, _coalescing_manager=each_by_itself)
    return _Instead(torch_, distributed=distributed)


class _Instead(ModuleType):
    """A module of which some names mean something else."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


FUNCTIONS = (
    *(nvfp4_multi_tensor_compute_partial_amax, nvfp4_compute_global_scale, nvfp4_multi_tensor_fused_scale),
    *(nvfp4_multi_tensor_2d_partial_cast, nvfp4_2d_multi_tensor_transpose, swap_first_dims),
)
