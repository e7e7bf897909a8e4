"""Compare several ways to compute S and the weight gradient of T on one device, to choose the fastest.

    python benchmarks/candidates.py [--tokens 2048,4096] [--hidden 4096] [--rows 8192,32768] [--output FILE.jsonl]

The package's own way comes first: cuBLAS computes the logits, and one pass of a Triton kernel turns them into E.

    kernels             as the package launches the kernel
    half the warps      with twice the logits per thread; in `three held`, the fourth piece of a row is read twice, for
                        64 warps per multiprocessor
    all pieces held, twice the warps
                        only where the package reads pieces twice: all pieces are held, or a program is twice as wide,
                        with idle lanes
    two reads BxW       rows are read twice, B logits at a time by W warps, instead of being held in registers
    blocks TxC          GEMM and pass for T tokens and C columns at a time, which fit L2, with one reference per row
    compiled            the pass as `torch.compile` makes it from PyTorch's operations

Every line is one shape and one way, which is checked against fp64 before it is timed. `s_over_gemm` and `t_over_gemm`
are times relative to the bare GEMM in cuBLAS, and `over_kernels` is S + T relative to the package's way; all come from
one process, in turns. For a way that does not compile or is wrong, the line has the error, the others continue, and the
exit status is 1. Without a GPU, everything runs on small shapes, with Triton in its interpreter, only to try out the
script.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402  (reads the environment)
from measuring import add_sizes, medians, sizes, write  # noqa: E402
from output_layer import Shape  # noqa: E402
from softmax_ways import exponentiate_block, launches  # noqa: E402

from megatron_vp.vocab.kernels import softmax  # noqa: E402
from megatron_vp.vocab.kernels.softmax import Launch, launch_for  # noqa: E402
from megatron_vp.vocab.loss import LINEAR, MAX  # noqa: E402
from megatron_vp.vocab.operations import fused_operations  # noqa: E402

BLOCKS = ((1024, 8192), (512, 8192), (1024, 16384)) if ON_GPU else ((48, 32), (128, 64))
"""The tokens and columns of a block, which has 8 to 32 MiB of logits."""


@torch.compile(dynamic=False)
def _exponentiate_compiled(logits_nv: torch.Tensor, target_n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # The total is exp(log-sum-exp - largest), because PyTorch 2.13's compiler for CPUs fails on the sum of the stored
    # values.
    wide = logits_nv.float()
    largest_n = wide.amax(-1)
    total_n = (wide.logsumexp(-1) - largest_n).exp()
    picked_n = wide.gather(1, target_n.clamp(0)[:, None]).squeeze(1)
    own = target_n[:, None] == torch.arange(logits_nv.shape[1], device=logits_nv.device)
    logits_nv.copy_((wide - largest_n[:, None]).exp().masked_fill(own, 0))
    return largest_n, total_n, torch.where(target_n >= 0, picked_n, 0)


class Way:
    """One way for one shape. `s` returns E [n, V/p] for T and fills the statistics; `t` adds to `main_grad`."""

    def __init__(self, shape: Shape, launch: Launch | None = None) -> None:
        self.shape = shape
        self.launch = launch or launch_for(len(shape.layer.weight), shape.x_nh.dtype)
        self.x_nh, self.weight = shape.x_nh, shape.layer.weight.detach()
        self.main_grad = shape.layer.weight.main_grad
        self.first = shape.layer.shards.start(shape.layer.index)
        self.operations = fused_operations()
        self.derivative = shape.pending.derivative(shape.total)
        self.statistics_3n = torch.empty_like(shape.pending.statistics_3n)

    def s(self) -> torch.Tensor:
        """Run cuBLAS and one pass over the logits."""
        exp_nv = self.x_nh @ self.weight.t()
        with mock.patch.object(softmax, "launch_for", lambda columns, dtype: self.launch):
            self.statistics_3n, *_ = softmax.exponentiate_(exp_nv, self.shape.labels_n, self.first, 1.0)
        return exp_nv

    def t(self, kept_nv: torch.Tensor) -> None:
        """Enter the targets into E, multiply X by row factors, and run a GEMM into `main_grad`."""
        token_loss_grad_n = self.shape.token_loss_grad_n
        weighed_nh = self.operations.enter_targets_(kept_nv, self.x_nh, token_loss_grad_n, self.derivative)
        self.operations.add_product_(self.main_grad, kept_nv, weighed_nh)


class Blocks(Way):
    """Computes S for some tokens and columns at a time."""

    def __init__(self, shape: Shape, tokens: int, columns: int) -> None:
        super().__init__(shape)
        self.tokens, self.columns = tokens, columns

    def s(self) -> torch.Tensor:
        """Run cuBLAS and the pass block by block; E is relative to the references of the rows."""
        (tokens, rows), target_n = (len(self.x_nh), len(self.weight)), self.shape.pending.target_n
        exp_nv = self.x_nh.new_empty(tokens, rows)
        self.statistics_3n = torch.zeros_like(self.statistics_3n)
        for top in range(0, tokens, self.tokens):
            span = slice(top, top + self.tokens)
            for start in range(0, rows, self.columns):
                columns = min(self.columns, rows - start)
                part_nv = exp_nv[span, start : start + columns]
                torch.mm(self.x_nh[span], self.weight[start : start + columns].t(), out=part_nv)
                exponentiate_block(exp_nv[span], target_n[span], self.statistics_3n[:, span], start, columns)
        self.derivative = replace(self.derivative, largest_n=self.statistics_3n[MAX])
        return exp_nv


class Compiled(Way):
    """Compiles the pass with `torch.compile`."""

    def s(self) -> torch.Tensor:
        """Run the GEMM with cuBLAS, and the rest as compiled by PyTorch."""
        exp_nv = self.x_nh @ self.weight.t()
        torch.stack(_exponentiate_compiled(exp_nv, self.derivative.target_n), out=self.statistics_3n)
        return exp_nv


def check(way: Way) -> None:
    """Check statistics and weight gradient against fp64, for the logits of a GEMM in the model's dtype.

    Raises ArithmeticError if they differ by more than one or two roundings.
    """
    shape = way.shape
    way.main_grad.zero_()
    way.t(way.s())
    x_nh = way.x_nh.double()
    logits_nv = (way.x_nh @ way.weight.t()).double()
    largest_n, total_n, linear_n = way.statistics_3n.double()
    found = {
        "log-sum-exp": largest_n + total_n.log(),
        "logit of the target": linear_n,
        "weight gradient": way.main_grad,
    }
    target_n, owned_n = way.derivative.target_n, way.derivative.target_n >= 0
    rows_of_d_nv = (logits_nv - way.derivative.largest_n.double()[:, None]).exp() * way.derivative.scale_n[:, None]
    rows_of_d_nv[owned_n, target_n[owned_n]] = way.derivative.entry_n[owned_n].double()
    expected = {
        "log-sum-exp": logits_nv.logsumexp(-1),
        "logit of the target": shape.pending.statistics_3n[LINEAR].double(),
        "weight gradient": rows_of_d_nv.t() @ (shape.token_loss_grad_n[:, None] * x_nh),
    }
    for what, value in expected.items():
        off = ((found[what] - value).norm() / value.norm()).item()
        if not off < 2 * torch.finfo(way.x_nh.dtype).eps:  # another GEMM's logits may differ by a rounding
            raise ArithmeticError(f"its {what} is {off:.2g} off")


def ways(shape: Shape) -> dict[str, Way]:
    """All ways by name."""
    columns, dtype = len(shape.layer.weight), shape.x_nh.dtype
    found = {name: Way(shape, launch) for name, launch in launches(columns, dtype).items()}
    found["compiled"] = Compiled(shape)
    if dtype != torch.float16:
        for tokens, width in BLOCKS:
            if tokens < len(shape.x_nh) or width < columns:
                found[f"blocks {tokens}x{width}"] = Blocks(shape, tokens, width)
    return found


def parts(way: Way, name: str) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """The parts of a way that are timed, and what must run before them. Each part is run once, so that parts that
    cannot compile fail here.

    T overwrites E, so before each call E is restored to what S returned.
    """
    kept_nv = way.s()
    fresh_nv = kept_nv.clone()
    works: dict[str, Callable[[], object]] = {f"s {name}": way.s, f"t {name}": lambda: way.t(kept_nv)}
    for work in works.values():
        work()
    return works, {f"t {name}": lambda: kept_nv.copy_(fresh_nv)}


def measure(shape: Shape, rounds: int, device: torch.device) -> dict[str, dict[str, object]]:
    """Measure the ratios of every way. A way that fails has its error in their place."""
    works: dict[str, Callable[[], object]] = {"gemm of s": shape.s_gemm, "gemm of t": shape.t_gemm}
    before: dict[str, Callable[[], object]] = {}
    results: dict[str, dict[str, object]] = {}
    for name, way in ways(shape).items():
        try:
            check(way)
            timed, prepared = parts(way, name)
            works, before = works | timed, before | prepared
            results[name] = {}
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip().partition("\n")[0]
            results[name] = {"error": f"{type(error).__name__}: {said}"}
    times = medians(works, rounds, device, before)
    ours = times["s kernels"] + times["t kernels"] if "s kernels" in times else None
    for name, result in results.items():
        if result:
            continue
        s, t = (times[f"{part} {name}"] for part in ("s", "t"))
        result |= {
            "s_over_gemm": s / times["gemm of s"],
            "t_over_gemm": t / times["gemm of t"],
            "over_kernels": (s + t) / ours if ours else None,
            "milliseconds": {"s": s, "t": t},
        }
    return results


def main() -> int:
    """Measure every shape, and print or append to a file one line of JSON per way. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(
        parser,
        tokens="2048,4096" if ON_GPU else "128",
        hidden="3072" if ON_GPU else "48",
        rows="8192,32768" if ON_GPU else "100",
    )
    parser.add_argument("--rounds", type=int, default=20 if ON_GPU else 1)
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
    machine = torch.cuda.get_device_name() if ON_GPU else f"{platform.machine()}, Triton's interpreter"
    status = 0
    for tokens, hidden, rows in sizes(args, "tokens", "hidden", "rows"):
        shape = Shape(tokens, hidden, rows, device, dtype)
        for name, found in measure(shape, args.rounds, device).items():
            line = {"machine": machine, "torch": torch.__version__, "triton": triton.__version__}
            write(line | {"tokens": tokens, "hidden": hidden, "rows": rows, "way": name} | found, args.output)
            status |= "error" in found
    return status


if __name__ == "__main__":
    sys.exit(main())
