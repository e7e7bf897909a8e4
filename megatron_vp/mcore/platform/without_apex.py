"""Accumulates weight gradients into `main_grad` with our own kernel where Apex is not installed.

Megatron's linear layers, including its vocabulary layers, use Apex's extension `fused_weight_gradient_mlp_cuda` for
this. Without the extension, Megatron builds the layers only if fused accumulation is switched off, which would affect
Transformer Engine's layers too, even though they do not need Apex.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_vp.mcore.patches import Patch
from megatron_vp.vocab.operations import operations_for


def accumulate_product(rows_ni: torch.Tensor, output_gradient_no: torch.Tensor, main_grad_oi: torch.Tensor) -> None:
    """Add the product output_gradient^T @ rows to main_grad. Both factors may have several leading dimensions.

    With PyTorch 2.10 or newer, a GPU adds the product of 16-bit factors to an fp32 `main_grad` in one GEMM. Older
    versions of PyTorch round the product to 16 bits before they add it.
    """
    rows_ni, output_gradient_no = rows_ni.flatten(0, -2), output_gradient_no.flatten(0, -2)
    operations_for(rows_ni).add_product_(main_grad_oi, output_gradient_no, rows_ni)


def _stand_in(original: Any) -> Any:
    # Apex has one function for an fp32 main_grad and one for a 16-bit main_grad; our function handles both cases.
    return SimpleNamespace(wgrad_gemm_accum_fp32=accumulate_product, wgrad_gemm_accum_fp16=accumulate_product)


_LAYERS = "megatron.core.tensor_parallel.layers"

PATCHES = (
    Patch(
        f"{_LAYERS}:_grad_accum_fusion_available",
        lambda original: True,
        "without Apex, Megatron refuses to build layers with fused accumulation of weight gradients",
        "value",
    ),
    Patch(
        f"{_LAYERS}:fused_weight_gradient_mlp_cuda",
        _stand_in,
        "our kernel that accumulates into main_grad replaces Apex's kernel",
        "nothing or value",
    ),
)
