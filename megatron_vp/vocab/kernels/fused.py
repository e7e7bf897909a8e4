"""Versions of the operations in `megatron_vp.vocab.eager` that run on GPUs and never wait for the device."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from megatron_vp.vocab.eager import EagerOperations
from megatron_vp.vocab.kernels import gradient_rows, rows, softmax


def adds_into_fp32(version: TorchVersion) -> bool:
    """Whether `addmm` of this PyTorch version can add a product of 16-bit factors to an fp32 matrix.

    In PyTorch 2.8 and 2.9, `addmm` has an argument `out_dtype`, but rejects this combination of dtypes.
    """
    return version >= "2.10"


_ADDS_INTO_FP32 = adds_into_fp32(torch.__version__)


class FusedOperations(EagerOperations):
    """Operations that use Triton kernels and cuBLAS."""

    exponentiate_ = staticmethod(softmax.exponentiate_)
    fold_ = staticmethod(softmax.fold_)
    rescale_ = staticmethod(gradient_rows.rescale_)
    enter_targets_ = staticmethod(gradient_rows.enter_targets_)
    add_rows_ = staticmethod(rows.add_rows_)

    def add_product_(self, matrix_vh: torch.Tensor, left_nv: torch.Tensor, right_nh: torch.Tensor) -> None:
        """Compute matrix += left^T right. Since PyTorch 2.10, 16-bit products are not rounded before they are added in
        fp32.
        """
        if matrix_vh.dtype == torch.float32 != left_nv.dtype and _ADDS_INTO_FP32:
            torch.addmm(matrix_vh, left_nv.t(), right_nh, out_dtype=torch.float32, out=matrix_vh)
        else:
            super().add_product_(matrix_vh, left_nv, right_nh)
