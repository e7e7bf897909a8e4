"""Compare S and T of one shard with their bare GEMMs, eager and compiled operations, and other implementations.

    python benchmarks/output_layer.py [--tokens 4096] [--hidden 4096] [--rows 8192,32768] [--output FILE.jsonl]

Every line is one shape. All calls of a line run in turns in one process. Compare the ratios of medians; milliseconds
depend on the machine.

    s_t_and_loss        our whole chain on one shard: S and T of vocab-2, the fold of C1's statistics, the losses, and
                        dX rescaled. Rivals (`rivals.py`) do the same, on a vocabulary of this shard's size
    s_over_aim, t_over_aim
                        relative to the aim: the GEMM, plus the time of a copy of the bytes that the accompanying kernel
                        reads and writes, plus 2.5 us for its launch, all on this device and in this process
    sustained           the same for S, and for S and T of vocab-2, relative to their GEMMs in a loop without pauses
    softmax_over_copy   time of S beyond its GEMM, relative to a copy of as many bytes in the same process, its roof
    t_dirty             T with an L2 full of lines that must be written back first
    error               of dX and dW, by norm, against fp64 on a part of the tokens

Without a GPU, the eager operations run on small shapes, only to try out the script.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from measuring import add_sizes, copy_bandwidth, device_state, sizes, spread, sustained, times, write
from rivals import rivals, versions

from megatron_vp.cost.ranks.vocab_kernels import LAUNCH
from megatron_vp.vocab import output
from megatron_vp.vocab.loss import CROSS_ENTROPY, GlobalStatistics
from megatron_vp.vocab.operations import EagerOperations
from megatron_vp.vocab.output import OutputLayer, PendingOutput
from megatron_vp.vocab.shards import VocabShards

SHARDS = 4
CHECKED_TOKENS = 512
"""The number of tokens whose gradients are compared with fp64; more would take longer than the measurement itself."""


class _Cut(VocabShards):
    """Shards with exactly the given number of rows, to measure what rounding up saves."""

    @property
    def rows_per_shard(self) -> int:
        """The rows per shard, not rounded up."""
        return -(-self.vocab_size // self.count)


class Shape:
    """One of `SHARDS` shards with everything that its passes need, and a method for everything that is timed."""

    def __init__(
        self, tokens: int, hidden: int, rows: int, device: torch.device, dtype: torch.dtype, shards: int = SHARDS
    ) -> None:
        torch.manual_seed(0)
        self.x_nh = torch.randn(tokens, hidden, device=device).to(dtype)
        weight = torch.nn.Parameter((torch.randn(rows, hidden, device=device) * 0.02).to(dtype))
        weight.main_grad = torch.zeros(rows, hidden, device=device)
        self.layer = OutputLayer(weight, _Cut(rows * shards, shards), 0)
        self.labels_n = torch.randint(rows * shards, (tokens,), device=device)
        self.token_loss_grad_n = torch.full((tokens,), 1 / tokens, device=device)
        self.pending = self.s()
        statistics_3n = self.pending.statistics_3n
        total_3n = torch.empty_like(statistics_3n)
        output.operations_for(total_3n).fold_(total_3n, statistics_3n.repeat(shards, 1, 1))
        self.total = GlobalStatistics(*total_3n)
        self._exp_nv = self.pending.exp_nv.clone()

    def restore_exp(self) -> None:
        """Restore E to what S returned, because T writes to it: in fp16, each call scales the rows that have a target
        here.
        """
        self.pending.exp_nv.copy_(self._exp_nv)

    def s(self) -> PendingOutput:
        """Run S of vocab-1."""
        return self.layer(self.x_nh, self.labels_n)

    def s_gemm(self) -> torch.Tensor:
        """Run only the GEMM of S."""
        return self.x_nh @ self.layer.weight.detach().t()

    def s_of_vocab_2(self) -> torch.Tensor:
        """Run S of vocab-2, which also computes E W."""
        return self.layer.unscaled_input_gradient(self.layer(self.x_nh, self.labels_n))

    def s_of_vocab_2_gemms(self) -> torch.Tensor:
        """Run only the GEMMs of vocab-2's S."""
        return self.s_gemm() @ self.layer.weight.detach()

    def t(self) -> None:
        """Run T of vocab-2, which computes the weight gradient."""
        self.layer.t_pass(self.pending, self.total, self.token_loss_grad_n, input_gradient=False)

    def t_gemm(self) -> None:
        """Run only the GEMM of T, into fp32 if the device supports that."""
        output.operations_for(self.x_nh).add_product_(self.layer.weight.main_grad, self.pending.exp_nv, self.x_nh)

    def s_and_t_gemms(self) -> None:
        """Run only the GEMMs of S and T."""
        self.s_of_vocab_2_gemms()
        self.t_gemm()

    def eager_s_and_t(self) -> None:
        """Run S and T of vocab-2 with plain PyTorch operations."""
        with mock.patch.object(output, "operations_for", lambda tensor: EagerOperations()):
            pending = self.s()
            self.layer.unscaled_input_gradient(pending)
            self.layer.t_pass(pending, self.total, self.token_loss_grad_n, input_gradient=False)

    def s_and_t(self) -> None:
        """Run S and T of vocab-2."""
        pending = self.s()
        self.layer.unscaled_input_gradient(pending)
        self.layer.t_pass(pending, self.total, self.token_loss_grad_n, input_gradient=False)

    def s_t_and_loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run everything that one shard computes for losses and gradients; return dX and `main_grad`."""
        pending = self.s()
        product_nh = self.layer.unscaled_input_gradient(pending)
        total_3n = torch.empty_like(pending.statistics_3n)
        output.operations_for(total_3n).fold_(total_3n, pending.statistics_3n[None])
        total = GlobalStatistics(*total_3n)
        total.token_loss(CROSS_ENTROPY)
        part_nh = self.layer.rescaled_input_gradient(product_nh, pending, total)
        self.layer.t_pass(pending, total, self.token_loss_grad_n, input_gradient=False)
        return part_nh * self.token_loss_grad_n[:, None], self.layer.weight.main_grad

    def rivals(self) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        """Other implementations that compute the loss for this shard's words, and both gradients."""
        return rivals(self.x_nh, self.layer.weight.detach(), self.labels_n % len(self.layer.weight))

    def bytes_allocated_by_s(self) -> int:
        """The GPU memory that S still holds when it has ended."""
        before = torch.cuda.memory_allocated()
        pending = self.s()
        taken = torch.cuda.memory_allocated() - before
        del pending
        return taken

    def bytes_kept_a_logit(self) -> float:
        """The bytes per logit that S leaves for T, including X and four vectors."""
        kept = (self.pending.exp_nv, self.x_nh, self.pending.statistics_3n, self.pending.target_logit_n)
        return sum(tensor.nbytes for tensor in kept) / self.pending.exp_nv.numel()


def expected(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """dX and dW of the mean loss over this shard's words, in fp64."""
    x_nh, weight_vh = (tensor.detach().double().requires_grad_() for tensor in (shape.x_nh, shape.layer.weight))
    labels_n = shape.labels_n % len(weight_vh)
    with torch.enable_grad():
        loss = torch.nn.functional.cross_entropy(x_nh @ weight_vh.t(), labels_n)
        return torch.autograd.grad(loss, (x_nh, weight_vh))


def said(error: Exception) -> str:
    """Describe an exception in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def errors(tokens: int, hidden: int, rows: int, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """The errors of dX and dW by norm on `CHECKED_TOKENS` tokens, for ours and every rival; or why one has none."""
    shape = Shape(min(tokens, CHECKED_TOKENS), hidden, rows, device, dtype, shards=1)
    references, found = expected(shape), {}
    shape.layer.weight.main_grad.zero_()
    for name, work in {"ours": shape.s_t_and_loss, **shape.rivals()}.items():
        try:
            gradients = work()
        except Exception as error:
            found[name] = said(error)
            continue
        found[name] = [
            ((gradient.double() - reference).norm() / reference.norm()).item()
            for gradient, reference in zip(gradients, references, strict=True)
        ]
    return found


def peaks(works: dict[str, Callable[[], object]]) -> dict[str, int]:
    """The largest number of bytes that each call allocates in addition to those allocated before it."""
    found = {}
    for name, work in works.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


def measure(shape: Shape, usable: list[str], rounds: int, device: torch.device) -> dict[str, object]:
    """Measure everything: medians and first and last deciles of milliseconds, and ratios that follow from them."""
    names = ["s_gemm", "s", "s_of_vocab_2_gemms", "s_of_vocab_2", "t_gemm", "t", "s_and_t", "eager_s_and_t"]
    works: dict[str, Callable[[], object]] = {name: getattr(shape, name) for name in [*names, "s_t_and_loss"]}
    failed = {}
    for name, work in shape.rivals().items():
        if name in usable:
            try:
                work()
            except Exception as error:  # for example too little memory for all tokens
                failed[name] = said(error)
            else:
                works[name] = work
    fresh = {"t": shape.restore_exp}
    taken = times(works, rounds, device, before=fresh)
    taken["t_dirty"] = times({"t": shape.t}, rounds, device, dirty=True, before=fresh)["t"]
    middle = {name: statistics.median(values) for name, values in taken.items()}
    logits = shape.pending.exp_nv.nbytes
    bandwidth = copy_bandwidth(logits, device)
    aims = {
        part: middle[f"{part}_gemm"] + 1e3 * (2 * moved / bandwidth + LAUNCH)
        for part, moved in (("s", logits), ("t", shape.x_nh.nbytes))
    }
    loop = {name: sustained(getattr(shape, name), device) for name in ("s_gemm", "s", "s_and_t_gemms", "s_and_t")}
    flops = 2e-9 * shape.x_nh.numel() * len(shape.layer.weight)
    whole = middle["s_t_and_loss"]
    on_gpu = device.type == "cuda"
    return {
        "gemm_tflops": {
            "s": flops / middle["s_gemm"],
            "e_w": flops / (middle["s_of_vocab_2_gemms"] - middle["s_gemm"]),
            "t": flops / middle["t_gemm"],
        },
        "s_over_gemm": middle["s"] / middle["s_gemm"],
        "s_of_vocab_2_over_gemms": middle["s_of_vocab_2"] / middle["s_of_vocab_2_gemms"],
        "t_over_gemm": middle["t"] / middle["t_gemm"],
        "s_over_aim": middle["s"] / aims["s"],
        "t_over_aim": middle["t"] / aims["t"],
        "sustained": {
            "gemm_tflops": flops / loop["s_gemm"],
            "s_over_gemm": loop["s"] / loop["s_gemm"],
            "s_and_t_over_gemms": loop["s_and_t"] / loop["s_and_t_gemms"],
            "milliseconds": loop,
        },
        "t_dirty_over_gemm": middle["t_dirty"] / middle["t_gemm"],
        "softmax_over_copy": (middle["s"] - middle["s_gemm"]) / (2e3 * logits / bandwidth),
        "copy_bytes_per_second": bandwidth,
        "eager_over_ours": middle["eager_s_and_t"] / middle["s_and_t"],
        "rivals_over_ours": {name: middle[name] / whole for name in usable if name in middle},
        "rivals_failed": failed,
        "bytes_kept_a_logit": shape.bytes_kept_a_logit(),
        "bytes_allocated_a_logit": shape.bytes_allocated_by_s() / shape.pending.exp_nv.numel() if on_gpu else None,
        "peak_bytes": peaks({name: works[name] for name in ("s_t_and_loss", *usable) if name in works})
        if on_gpu
        else None,
        "milliseconds": middle,
        "tenths": {name: spread(values) for name, values in taken.items()},
        "device_state": device_state(device),
    }


def main() -> int:
    """Measure every combination, and print or append to a file one line of JSON for each. Returns 1 if one failed."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # for Liger; must be set before Triton is imported
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(
        parser,
        tokens="2048,4096" if on_gpu else "256",
        hidden="3072,4096,6144" if on_gpu else "128",
        # Shards no longer have the last three sizes: not a multiple of 16, not a multiple of 8, and odd.
        rows="8192,32768,9536,9496,4748,10667" if on_gpu else "1000",
    )
    parser.add_argument(
        "--dtype", default="bfloat16" if on_gpu else "float32", choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), getattr(torch, args.dtype)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, eager operations"
    status = 0
    for tokens, hidden, rows in sizes(args, "tokens", "hidden", "rows"):
        line = {
            "machine": machine,
            "torch": torch.__version__,
            "rivals": versions(),
            "dtype": args.dtype,
            "tokens": tokens,
            "hidden": hidden,
            "rows": rows,
        }
        try:
            wrong = errors(tokens, hidden, rows, device, dtype)
            shape = Shape(tokens, hidden, rows, device, dtype)
            usable = [name for name, error in wrong.items() if name != "ours" and not isinstance(error, str)]
            line |= {"error": wrong} | measure(shape, usable, args.rounds, device)
        except Exception as error:  # the following shapes are still measured
            traceback.print_exc()
            line["failed"] = said(error)
            status = 1
        write(line, args.output)
    return status


if __name__ == "__main__":
    sys.exit(main())
