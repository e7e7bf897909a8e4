"""Patches with which `--moe-token-dispatcher-type alltoall` runs without CUDA, over gloo; `cpu.py` includes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_vp.mcore.patches import Patch


def _sizes_as_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def _gather_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def _gather_along_first_dim(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None:
            return original(input_, group, use_global_buffer=use_global_buffer)
        lengths = [int(length) for length in output_split_sizes]
        output = input_.new_empty((sum(lengths), *input_.shape[1:]))
        to_everyone = [len(input_)] * len(lengths)
        dist.all_to_all_single(output, torch.cat([input_] * len(lengths)), lengths, to_everyone, group)
        return output

    return _gather_along_first_dim


def _reduce_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def _reduce_scatter_along_first_dim(
        input_: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None:
            return original(input_, group, use_global_buffer=use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split([int(length) for length in input_split_sizes])[group.rank()].clone()

    return _reduce_scatter_along_first_dim


PATCHES = (
    Patch(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _sizes_as_numbers,
        "the experts' all-to-all needs its sizes as Python numbers, but Megatron converts only sizes that are on a GPU",
        "(tensor, as_numpy=False, record_stream=False)",
    ),
    *(
        Patch(
            f"megatron.core.tensor_parallel.mappings:{name}",
            replacement,
            "gloo gathers and scatters only parts of equal size, but ranks have different numbers of tokens for an "
            "expert",
            f"(input_, group, {sizes}=None, use_global_buffer=False)",
        )
        for name, replacement, sizes in (
            ("_gather_along_first_dim", _gather_uneven, "output_split_sizes"),
            ("_reduce_scatter_along_first_dim", _reduce_uneven, "input_split_sizes"),
        )
    ),
)
