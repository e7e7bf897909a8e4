"""What Transformer Engine compiles, in a few lines of PyTorch each: of the module `transformer_engine_torch` that much
as its linear layers, norms, attention and optimizer call in a model in fp32; whatever else is called raises.

Signatures and results are those of its sources (`csrc/extensions`, 2.8 to 2.20).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch


def generic_gemm(
    A: torch.Tensor,
    transA: bool,
    B: torch.Tensor,
    transB: bool,
    D: torch.Tensor | None,
    quantizer: object,
    output_dtype: object,
    bias: torch.Tensor | None,
    bias_type: object,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: object = None,
    comm_type: object = None,
    extra_output: object = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """D = op(B) op(A), for row-major matrices; without `grad` plus the bias, else with the bias's gradient."""
    assert not gelu and comm_overlap is None and quantizer is None, "only a plain product has a stand-in"
    assert alpha == 1 and beta in (None, 0, float(accumulate))
    left, right = (B.flatten(0, -2).t() if transB else B), (A.t() if transA else A.flatten(0, -2))
    product = left @ right
    if bias is not None and not grad:
        product = product + bias
    if D is not None:
        product = D.add_(product) if accumulate else D.copy_(product)
    return product, B.flatten(0, -2).sum(0) if bias is not None and grad else None, None, None


def te_general_grouped_gemm(
    A: list[torch.Tensor],
    transa: bool,
    B: list[torch.Tensor],
    transb: bool,
    D: list[torch.Tensor] | None,
    D_type: object,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type: object,
    single_output: bool,
    pre_gelu_out: list[torch.Tensor],
    grad: bool,
    workspace: list[torch.Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """D_i = op(B_i) op(A_i), into one tensor after the other or into rows of one; the biases, or with `grad` theirs.

    A product over no tokens is zero. It leaves a D that is accumulated as it is.
    """
    outputs = list(D[0].split([len(rows) for rows in B])) if single_output else D
    for left, right, output, bias_i in zip(B, A, outputs, bias, strict=True):
        product = (left.t() if transb else left) @ (right.t() if transa else right)
        if grad and bias_i.numel():
            bias_i.copy_(left.sum(0))
        elif bias_i.numel():
            product = product + bias_i
        if accumulate:
            output.add_(product)
        else:
            output.copy_(product)
    return bias


def _scale(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight + 1 if zero_centered else weight


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: object,
    otype: object,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalised rows; their means and reciprocal deviations."""
    mean = input.mean(-1, keepdim=True)
    reciprocal = (input - mean).square().mean(-1, keepdim=True).add(eps).rsqrt()
    output = (input - mean) * reciprocal * _scale(weight, zero_centered_gamma) + bias
    return _put(ln_out, output), mean.flatten(), reciprocal.flatten()


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of rows, weight and bias."""
    normal = (x - mu[:, None]) * rsigma[:, None]
    scaled = dz * _scale(gamma, zero_centered_gamma)
    projected = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
    return (scaled - projected) * rsigma[:, None], (dz * normal).sum(0), dz.sum(0)


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: object,
    otype: object,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The normalised rows; their reciprocal root mean squares."""
    reciprocal = input.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return _put(ln_out, input * reciprocal * _scale(weight, zero_centered_gamma)), None, reciprocal.flatten()


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rows and weight."""
    normal = x * rsigma[:, None]
    scaled = dz * _scale(gamma, zero_centered_gamma)
    return (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rsigma[:, None], (dz * normal).sum(0)


def _put(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence], scale: Any) -> None:
    """Every tensor of the second list becomes one of the first, scaled by a number or a tensor."""
    for given, scaled in zip(*tensor_lists, strict=True):
        scaled.copy_(given * scale)


def multi_tensor_scale_tensor(*args: Any) -> None:
    """The same under another name, where the scale is a tensor."""
    multi_tensor_scale(*args)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of AdamW on (gradients, parameters, first moments, second moments)."""
    assert mode == 1 and bias_correction
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


_FUNCTIONS = (
    *(generic_gemm, te_general_grouped_gemm, layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd),
    *(multi_tensor_scale, multi_tensor_scale_tensor, multi_tensor_adam, get_cudnn_version),
    get_num_cublas_streams,
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
    return module


def apex_module() -> ModuleType:
    """Apex's product into main_grad, by which Megatron's own vocabulary layers fuse accumulation."""
    module = _Compiled("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = lambda rows, dy, main_grad: main_grad.add_(dy.t() @ rows)
    return module
