"""Replacements in PyTorch for the compiled parts of Transformer Engine that tests need.

These are the parts of `transformer_engine_torch` that its linear layers, norms, attention and optimizer call. Calls of
any other part raise an error. Signatures, results and their dtypes are those of Transformer Engine's sources
(`csrc/extensions`, 2.8 to 2.20). As on a device, 16-bit operands are multiplied and summed in fp32 and rounded once.
Quantised operands are in `engine_fp8`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.mcore import engine_fp4, engine_fp8
from tests.mcore.engine_fp8 import dense, wide


@torch.no_grad()
def generic_gemm(
    A, transA, B, transB, D, quantizer, out_dtype, bias, _bias, gelu, _in, grad, _work, _size, accumulate, *_, **given
):
    """D = op(B) op(A), for row-major matrices; without `grad` plus the bias, else with the bias's gradient.

    The bias's gradient has D's dtype.
    """
    assert not gelu and given.get("comm_overlap") is None and quantizer is None, "only a plain product has a stand-in"
    assert given.get("alpha", 1) == 1 and given.get("beta") in (None, 0, float(accumulate))
    dtype = A.dtype if out_dtype is None else _TORCH[int(out_dtype)]
    left, right = wide(dense(B, transB)), wide(dense(A, not transA))
    product = (left.flatten(0, -2).t() if transB else left) @ (right.t() if transA else right.flatten(0, -2))
    if bias is not None and not grad:
        product = product + bias
    if D is None:
        assert not accumulate
        product = product.to(dtype)
    else:
        assert D.dtype == dtype and D.is_contiguous()
        product = D.copy_(wide(D) + product) if accumulate else D.copy_(product)
    return product, left.flatten(0, -2).sum(0).to(dtype) if bias is not None and grad else None, None, None


@torch.no_grad()
def te_general_grouped_gemm(
    A, transa, B, transb, D, D_type, _splits, bias, _bias, single_output, _gelu, grad, _work, _size, accumulate, *_
):
    """D_i = op(B_i) op(A_i), into one tensor after the other or into rows of one; the biases, or with `grad` theirs.

    A product over no tokens is zero. It leaves a D that is accumulated as it is.
    """
    assert all(output.dtype == _TORCH[int(D_type)] for output in D)
    left_right = [(wide(dense(left, transb)), wide(dense(right, not transa))) for left, right in zip(B, A, strict=True)]
    outputs = list(D[0].split([len(left) for left, _ in left_right])) if single_output else D
    for (left, right), output, bias_i in zip(left_right, outputs, bias, strict=True):
        product = (left.t() if transb else left) @ (right.t() if transa else right)
        if grad and bias_i.numel():
            bias_i.copy_(left.sum(0))
        elif bias_i.numel():
            product = product + bias_i
        output.copy_(wide(output) + product if accumulate else product)
    return bias


def _scale(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return wide(weight) + 1 if zero_centered else wide(weight)


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """The normalised rows, quantised where there is a quantizer; their means and reciprocal deviations in fp32."""
    rows = wide(input)
    mean = rows.mean(-1, keepdim=True)
    reciprocal = (rows - mean).square().mean(-1, keepdim=True).add(eps).rsqrt()
    output = (rows - mean) * reciprocal * _scale(weight, zero_centered_gamma) + bias
    return _put(ln_out, output, quantizer, otype), mean.flatten(), reciprocal.flatten()


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    """The gradients of rows, weight and bias."""
    dtype, dz = gamma.dtype, wide(dz)
    normal = (wide(x) - mu[:, None]) * rsigma[:, None]
    scaled = dz * _scale(gamma, zero_centered_gamma)
    projected = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
    rows = ((scaled - projected) * rsigma[:, None]).to(x.dtype)
    return rows, (dz * normal).sum(0).to(dtype), dz.sum(0).to(dtype)


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """The normalised rows, quantised where there is a quantizer; their reciprocal root mean squares in fp32."""
    rows = wide(input)
    reciprocal = rows.square().mean(-1, keepdim=True).add(eps).rsqrt()
    output = rows * reciprocal * _scale(weight, zero_centered_gamma)
    return _put(ln_out, output, quantizer, otype), None, reciprocal.flatten()


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    """The gradients of rows and weight."""
    dz = wide(dz)
    normal = wide(x) * rsigma[:, None]
    scaled = dz * _scale(gamma, zero_centered_gamma)
    rows = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rsigma[:, None]
    return rows.to(x.dtype), (dz * normal).sum(0).to(gamma.dtype)


def _put(out: Any, result: torch.Tensor, quantizer: Any, otype: Any) -> Any:
    if quantizer is not None:
        return engine_fp8.quantize(result.to(_TORCH[int(otype)]), quantizer, out)
    return result.to(_TORCH[int(otype)]) if out is None else out.copy_(result)


def scaled_upper_triang_masked_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """The causal softmax of [batch, s, s]."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (wide(scores) * scale).masked_fill(future, float("-inf")).softmax(-1).to(scores.dtype)


def scaled_masked_softmax_forward(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The softmax of [b, heads, s, s] without the positions of the mask."""
    return (wide(scores) * scale).masked_fill(mask, -10000.0).softmax(-1).to(scores.dtype)


def scaled_masked_softmax_backward(*args: Any) -> torch.Tensor:
    """The gradient of the scores."""
    return scaled_upper_triang_masked_softmax_backward(*args)


def scaled_upper_triang_masked_softmax_backward(output_gradient, softmax, scale):
    """The gradient of the scores."""
    weighed = wide(output_gradient) * wide(softmax)
    return (scale * (weighed - wide(softmax) * weighed.sum(-1, keepdim=True))).to(softmax.dtype)


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence], scale: Any) -> None:
    """Every tensor of the second list becomes one of the first, scaled by a number or a tensor."""
    for given, scaled in zip(*tensor_lists, strict=True):
        scaled.copy_(given * scale)


def multi_tensor_scale_tensor(*args: Any) -> None:
    """The same under another name, where the scale is a tensor."""
    multi_tensor_scale(*args)


def multi_tensor_adam(
    chunk_size, noop, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
):
    """A step of AdamW on (gradients, parameters, first moments, second moments)."""
    assert mode == 1 and bias_correction
    assert all(each.dtype == torch.float32 for each in (*tensor_lists[1], *tensor_lists[2], *tensor_lists[3]))
    for gradient, parameter, first, second in zip(*tensor_lists, strict=True):
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient.square(), 1 - beta2)
        deviation = second.div(1 - beta2**step).sqrt().add(epsilon)
        parameter.sub_(lr * (first.div(1 - beta1**step) / deviation + weight_decay * parameter))


def get_cudnn_version() -> int:
    """The oldest that Transformer Engine 2.20 takes."""
    return 91200


def get_num_cublas_streams() -> int:
    """As many workspaces are made for grouped products."""
    return 4


def get_cublasLt_version() -> int:
    """Older than what grouped products over one tensor ask for."""
    return 130200


class _DType(IntEnum):
    """The dtypes by their numbers in the compiled module."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = engine_fp8.E4M3
    kFloat8E5M2 = engine_fp8.E5M2
    kFloat4E2M1 = 10


_TORCH = {_DType.kFloat32: torch.float32, _DType.kFloat16: torch.float16, _DType.kBFloat16: torch.bfloat16}

_FUNCTIONS = (
    *(generic_gemm, te_general_grouped_gemm, layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd),
    *(scaled_upper_triang_masked_softmax_forward, scaled_upper_triang_masked_softmax_backward),
    *(scaled_masked_softmax_forward, scaled_masked_softmax_backward),
    *(multi_tensor_scale, multi_tensor_scale_tensor, multi_tensor_adam, get_cudnn_version),
    *(get_num_cublas_streams, get_cublasLt_version),
    *engine_fp8.FUNCTIONS,
    *engine_fp4.FUNCTIONS,
)


class _Enumeration(type):
    """A class whose members are made when they are first named; they are counted in `__members__`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls(len(cls.__members__))
        cls.__members__[name] = member
        setattr(cls, name, member)
        return member


class _Compiled(ModuleType):
    """The compiled module: Python finds every name in it, but what has no stand-in raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found: Any = _Enumeration(name, (int,), {"__members__": {}})
        else:

            def found(*args: object, **kwargs: object) -> None:
                raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in")

            found.__signature__ = False  # a compiled function has none that Python could read
        setattr(self, name, found)
        return found


def compiled_module() -> ModuleType:
    """What `import transformer_engine_torch` is to find."""
    module = _Compiled("transformer_engine_torch")
    for function in _FUNCTIONS:
        setattr(module, function.__name__, function)
    module.DType = _DType
    # Where a layer's tensors are in its tables of scales: three in the forward of each product, two in its backward.
    forward = {f"GEMM{gemm}_{name}": 3 * (gemm - 1) + place for gemm in (1, 2, 3) for place, name in _IN_FORWARD}
    backward = {f"GRAD_{name}{gemm}": 2 * (gemm - 1) + place for gemm in (1, 2, 3) for place, name in _IN_BACKWARD}
    module.FP8FwdTensors, module.FP8BwdTensors = SimpleNamespace(**forward), SimpleNamespace(**backward)
    return module


_IN_FORWARD = tuple(enumerate(("INPUT", "WEIGHT", "OUTPUT")))
_IN_BACKWARD = tuple(enumerate(("OUTPUT", "INPUT")))


def apex_module() -> ModuleType:
    """Apex's product into main_grad, by which Megatron's own vocabulary layers fuse accumulation."""
    module = _Compiled("fused_weight_gradient_mlp_cuda")
    module.__spec__ = ModuleSpec(module.__name__, loader=None)

    def wgrad_gemm_accum_fp32(rows: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        assert rows.dim() == dy.dim() == 2 and main_grad.dtype == torch.float32
        main_grad.add_(wide(dy).t() @ wide(rows))

    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    return module
