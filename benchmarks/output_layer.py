"""S and T of one shard beside their bare GEMMs, eager operations and Liger's kernel, and what is kept between them.

    python benchmarks/output_layer.py [--tokens 4096] [--hidden 4096] [--rows 8192,32768] [--output FILE.jsonl]

Every line is one shape. All times of a line come from one process, in turns: the medians' ratios are the result, the
milliseconds belong to the machine. Without a GPU it runs the eager operations on small shapes, to be tried at all.

Where the package `liger-kernel` is installed, its fused linear cross entropy runs beside S and T: forward and backward
over a vocabulary of this shard's size, so the same three GEMMs, with the weight gradient accumulated in fp32. It
recomputes nothing and keeps no logits, but returns only when the loss is known: it cannot be cut in two at a barrier.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from pathlib import Path
from unittest import mock

import torch
from measuring import add_sizes, medians, sizes, write

from megatron_vp.vocab import output
from megatron_vp.vocab.operations import EagerOperations
from megatron_vp.vocab.output import OutputLayer, PendingOutput
from megatron_vp.vocab.shards import VocabShards
from megatron_vp.vocab.statistics import GlobalStatistics

SHARDS = 4
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


class Shape:
    """One shard of `SHARDS` with everything that its passes need, and each thing to be timed as a method."""

    def __init__(self, tokens: int, hidden: int, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.x_nh = torch.randn(tokens, hidden, device=device).to(dtype)
        weight = torch.nn.Parameter((torch.randn(rows, hidden, device=device) * 0.02).to(dtype))
        weight.main_grad = torch.zeros(rows, hidden, device=device)
        self.layer = OutputLayer(weight, VocabShards(rows * SHARDS, SHARDS), 0)
        self.labels_n = torch.randint(rows * SHARDS, (tokens,), device=device)
        self.row_gradient_n = torch.full((tokens,), 1 / tokens, device=device)
        self.pending = self.s()
        statistics_3n = self.pending.statistics_3n
        total_3n = torch.empty_like(statistics_3n)
        output.operations_for(total_3n).fold_(total_3n, statistics_3n.repeat(SHARDS, 1, 1))
        self.total = GlobalStatistics(*total_3n)
        if HAS_LIGER:
            from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

            self.liger_loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
            self.leaf_nh = self.x_nh.clone().requires_grad_()

    def s(self) -> PendingOutput:
        """S of vocab-1."""
        return self.layer(self.x_nh, self.labels_n)

    def s_gemm(self) -> torch.Tensor:
        """The GEMM of S alone."""
        return self.x_nh @ self.layer.weight.detach().t()

    def s_of_vocab_2(self) -> torch.Tensor:
        """S of vocab-2: E W as well."""
        return self.layer.unscaled_input_gradient(self.layer(self.x_nh, self.labels_n))

    def s_of_vocab_2_gemms(self) -> torch.Tensor:
        """The GEMMs of vocab-2's S alone."""
        return self.s_gemm() @ self.layer.weight.detach()

    def t(self) -> None:
        """T of vocab-2: the weight gradient."""
        self.layer.t_pass(self.pending, self.total, self.row_gradient_n, input_gradient=False)

    def t_gemm(self) -> None:
        """The GEMM of T alone, into fp32 where the device can."""
        output.operations_for(self.x_nh).add_product_(self.layer.weight.main_grad, self.pending.exp_nv, self.x_nh)

    def eager_s_and_t(self) -> None:
        """S and T of vocab-2 on plain PyTorch operations."""
        with mock.patch.object(output, "operations_for", lambda tensor: EagerOperations()):
            pending = self.s()
            self.layer.unscaled_input_gradient(pending)
            self.layer.t_pass(pending, self.total, self.row_gradient_n, input_gradient=False)

    def s_and_t(self) -> None:
        """S and T of vocab-2."""
        pending = self.s()
        self.layer.unscaled_input_gradient(pending)
        self.layer.t_pass(pending, self.total, self.row_gradient_n, input_gradient=False)

    def liger(self) -> None:
        """Loss and both gradients by Liger's fused linear cross entropy; the last layer's gradient of the loss is 1."""
        weight = self.layer.weight
        self.liger_loss(weight, self.leaf_nh, self.labels_n % len(weight)).backward()
        weight.grad = self.leaf_nh.grad = None

    def bytes_allocated_by_s(self) -> int:
        """What S has taken from a GPU's memory when it is over."""
        before = torch.cuda.memory_allocated()
        pending = self.s()
        taken = torch.cuda.memory_allocated() - before
        del pending
        return taken

    def bytes_kept_a_logit(self) -> float:
        """What S leaves for T, X and four vectors included, over the number of logits."""
        kept = (self.pending.exp_nv, self.x_nh, self.pending.statistics_3n, self.pending.target_logit_n)
        return sum(tensor.nbytes for tensor in kept) / self.pending.exp_nv.numel()


def measure(shape: Shape, rounds: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of everything."""
    names = ["s_gemm", "s", "s_of_vocab_2_gemms", "s_of_vocab_2", "t_gemm", "t", "s_and_t", "eager_s_and_t"]
    names += ["liger"] if HAS_LIGER else []
    return medians({name: getattr(shape, name) for name in names}, rounds, device)


def main() -> None:
    """Measure every combination and print, or append to a file, a line of JSON each."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # for Liger, before anything imports Triton
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(
        parser,
        tokens="2048,4096,8192" if on_gpu else "256",
        hidden="3072,4096,5120,6144" if on_gpu else "128",
        rows="4096,8192,16384,32768" if on_gpu else "1000",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, eager operations"
    for tokens, hidden, rows in sizes(args, "tokens", "hidden", "rows"):
        shape = Shape(tokens, hidden, rows, device, dtype)
        times = measure(shape, args.rounds, device)
        line = {
            "machine": machine,
            "torch": torch.__version__,
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": tokens,
            "hidden": hidden,
            "rows": rows,
            "gemm_tflops": 2e-9 * tokens * hidden * rows / times["s_gemm"],
            "s_over_gemm": times["s"] / times["s_gemm"],
            "s_of_vocab_2_over_gemms": times["s_of_vocab_2"] / times["s_of_vocab_2_gemms"],
            "t_over_gemm": times["t"] / times["t_gemm"],
            "eager_over_ours": times["eager_s_and_t"] / times["s_and_t"],
            "liger_over_ours": times["liger"] / times["s_and_t"] if HAS_LIGER else None,
            "bytes_kept_a_logit": shape.bytes_kept_a_logit(),
            "bytes_allocated_a_logit": shape.bytes_allocated_by_s() / (tokens * rows) if on_gpu else None,
            "milliseconds": times,
        }
        write(line, args.output)


if __name__ == "__main__":
    main()
