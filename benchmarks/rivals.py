"""Other implementations of the output layer with cross entropy, in the modes in which they are fastest.

Each takes x [n, h], W [V/p, h] and labels, and returns dX and dW of the mean loss, with the same three GEMMs as S and
T. None of them can be cut in two at a barrier. All of them round dW to the weight's dtype at the end, whereas S and T
add to an fp32 `main_grad`.

    liger K             Liger's chunk loop with `chunk_mem_const` K: how many times n x h of logits a chunk may hold
    liger loss          Liger's public loss, with its own backward
    pytorch             torch.nn.functional.linear_cross_entropy, if PyTorch has it
    pytorch chunked     the same with its options, which choose the chunks
    quack               chunked_linear_cross_entropy (bf16)
    quack scaled        the same with scaled exponentials (V/p a multiple of 128, capability 9.0)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial

import torch

Gradients = tuple[torch.Tensor, torch.Tensor]
CHUNK_BUDGETS = (1, 4)
QUACK_WIDTH = 128


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in ("liger-kernel", "quack-kernels", "nvidia-cutlass-dsl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rivals(x_nh: torch.Tensor, weight_vh: torch.Tensor, labels_n: torch.Tensor) -> dict[str, Callable[[], Gradients]]:
    """The rivals by name that are installed and support these shapes.

    A package that cannot be imported, for example because it does not fit this PyTorch, becomes a rival that raises the
    error.
    """
    makers = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        makers["liger"] = _liger
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        makers["pytorch"] = _pytorch
    if importlib.util.find_spec("quack") is not None and x_nh.is_cuda and x_nh.dtype == torch.bfloat16:
        makers["quack"] = _quack
    found: dict[str, Callable[[], Gradients]] = {}
    for name, make in makers.items():
        try:
            found |= make(x_nh, weight_vh, labels_n)
        except Exception as error:
            found[name] = partial(_fail, error)
    return found


def _fail(error: Exception) -> Gradients:
    raise error


def _by_autograd(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x_nh: torch.Tensor, weight_vh: torch.Tensor
) -> Callable[[], Gradients]:
    x_nh, weight_vh = (tensor.detach().clone().requires_grad_() for tensor in (x_nh, weight_vh))

    def work() -> Gradients:
        with torch.enable_grad():
            return torch.autograd.grad(loss(x_nh, weight_vh), (x_nh, weight_vh))

    return work


def _liger(x_nh: torch.Tensor, weight_vh: torch.Tensor, labels_n: torch.Tensor) -> dict[str, Callable[[], Gradients]]:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    # The chunk loop computes both gradients if the operands require them.
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x_nh, weight_vh)]

    def chunks(budget: int) -> Callable[[], Gradients]:
        def work() -> Gradients:
            results = fused_linear_cross_entropy_forward(
                *leaves, labels_n, accum_dtype=torch.float32, chunk_mem_const=budget
            )
            tensors = [each for each in results if isinstance(each, torch.Tensor)]
            shaped = [next(each for each in tensors if each.shape == leaf.shape) for leaf in leaves]
            return shaped[0], shaped[1]

        return work

    public = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    found = {"liger loss": _by_autograd(lambda x, weight: public(weight, x, labels_n), x_nh, weight_vh)}
    budgets = {*CHUNK_BUDGETS, max(1, len(weight_vh) // x_nh.shape[1])}
    return found | {f"liger {budget}": chunks(budget) for budget in sorted(budgets)}


def _pytorch(x_nh: torch.Tensor, weight_vh: torch.Tensor, labels_n: torch.Tensor) -> dict[str, Callable[[], Gradients]]:
    loss = torch.nn.functional.linear_cross_entropy
    found = {"pytorch": _by_autograd(lambda x, weight: loss(x, weight, labels_n), x_nh, weight_vh)}
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        chunked = options()
        found["pytorch chunked"] = _by_autograd(
            lambda x, weight: loss(x, weight, labels_n, options=chunked), x_nh, weight_vh
        )
    return found


def _quack(x_nh: torch.Tensor, weight_vh: torch.Tensor, labels_n: torch.Tensor) -> dict[str, Callable[[], Gradients]]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(scaled: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda x, weight: chunked_linear_cross_entropy(x, weight, labels_n, tuned=True, use_scaled_exp=scaled)

    found = {"quack": _by_autograd(loss(False), x_nh, weight_vh)}
    if len(weight_vh) % QUACK_WIDTH == 0 and torch.cuda.get_device_capability() == (9, 0):
        found["quack scaled"] = _by_autograd(loss(True), x_nh, weight_vh)
    return found
