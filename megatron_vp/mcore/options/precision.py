"""Describes which parts of a job compute in fp8 or fp4.

All layers except the vocabulary layers may, and may keep their weights in that format. The vocabulary layers stay in
the model's dtype. docs/evidence/on_gpu.md says how each recipe was tested.
"""

from __future__ import annotations

import argparse


def describe_precision(a: argparse.Namespace) -> str | None:
    """Describe which parts of an accepted job compute in fp8 or fp4, and how this was tested; None if no part does."""
    if not (a.fp8 or a.fp4):
        return None
    vocabulary = "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32"
    layers = "the other layers and their weights" if a.fp8_param_gather or a.fp4_param_gather else "the other layers"
    if a.fp4:
        # In fp4, gradients are rounded with random numbers, which depend on the order of passes.
        return (
            f"{vocabulary} in the vocabulary layers, fp4 ({a.fp4_recipe}) in {layers}: tested only on CPU, without "
            "the fp4 kernels; losses differ between schedules, because gradients are rounded stochastically"
        )
    return (
        f"{vocabulary} in the vocabulary layers, fp8 ({a.fp8_recipe}) in {layers}: tested only on CPU, without the fp8 "
        "kernels"
    )
