"""What bounds the kernels of S and T, by shape and device: the table in docs/gpu.md.

    python benchmarks/roofline.py

A kernel takes the longer of its memory time and its issue time, and a fixed time for its launch and its tail. Memory
time is bytes over the bandwidth of a device copy. Issue time is the committed count of instructions
(tests/vocab/data/kernel_counts.csv) over 75 percent of what the multiprocessors can issue. Nothing here is measured.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

COUNTS = Path(__file__).parents[1] / "tests/vocab/data/kernel_counts.csv"
TRITON = "3.9.0"
ISSUED = 0.75
"""Of all issue slots, how many a kernel with 64 warps per multiprocessor is taken to use."""
GAP = 2.5e-6
"""Seconds between a GEMM and a kernel after it, with the kernel's start and tail."""


@dataclass(frozen=True)
class Device:
    """Assumed rates: a bf16 GEMM's operations, a copy's bytes, and instructions of single threads, per second."""

    name: str
    gemm: float
    copy: float
    issue: float


DEVICES = [
    Device("H100", 700e12, 3.0e12, 132 * 128 * 1.7e9),
    Device("H200", 700e12, 4.3e12, 132 * 128 * 1.7e9),
    Device("B200", 1500e12, 7.0e12, 148 * 128 * 1.85e9),
]


@dataclass(frozen=True)
class Shape:
    """n tokens, V/p columns, h."""

    tokens: int
    columns: int
    hidden: int


SHAPES = [Shape(n, v, h) for v in (8192, 32768) for n in (2048, 4096) for h in (3072, 4096, 6144)]


def instructions_per_logit(columns: int) -> float:
    """Of the softmax in bf16 for capability 9.0, as committed."""
    with COUNTS.open() as file:
        for line in csv.DictReader(file):
            what = line["triton"], line["kernel"], line["dtype"], line["width"], line["smoothed"]
            if what == (TRITON, "_exponentiate", "bfloat16", str(columns), "False"):
                return float(line["per_element"])
    raise LookupError(f"{COUNTS.name} has no count of rows of {columns} logits")


def softmax_times(shape: Shape, device: Device) -> tuple[float, float]:
    """Seconds that the memory and the issue of instructions take of S's kernel: one read and one write per logit."""
    logits = shape.tokens * shape.columns
    issue = logits * instructions_per_logit(shape.columns) / (device.issue * ISSUED)
    return 4 * logits / device.copy, issue


def s_over_gemm(shape: Shape, device: Device) -> float:
    """vocab-1's S over its GEMM."""
    gemm = 2 * shape.tokens * shape.columns * shape.hidden / device.gemm
    return 1 + (max(softmax_times(shape, device)) + GAP) / gemm


def t_over_gemm(shape: Shape, device: Device) -> float:
    """vocab-2's T over its GEMM, which also reads and writes an fp32 `main_grad`."""
    n, v, h = shape.tokens, shape.columns, shape.hidden
    gemm = max(2 * n * v * h / device.gemm, (8 * v * h + 2 * n * (v + h)) / device.copy)
    return 1 + (4 * n * h / device.copy + GAP) / gemm


def table() -> str:
    """In Markdown."""
    names = " | ".join(f"{device.name}: memory, issue (us) | S | T" for device in DEVICES)
    lines = [f"| n x V/p | h | {names} |", "|---" * (2 + 3 * len(DEVICES)) + "|"]
    for shape in SHAPES:
        cells = [f"{shape.tokens} x {shape.columns}", str(shape.hidden)]
        for device in DEVICES:
            memory, issue = softmax_times(shape, device)
            longer = max(memory, issue)
            times = (f"**{1e6 * time:.0f}**" if time == longer else f"{1e6 * time:.0f}" for time in (memory, issue))
            cells += [", ".join(times), f"{s_over_gemm(shape, device):.2f}", f"{t_over_gemm(shape, device):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
