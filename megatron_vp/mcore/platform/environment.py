"""Lists the parts of this installation that a training run uses, and the consequence of each part that is missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_vp.mcore.platform.installed import here


@dataclass(frozen=True)
class Part:
    """One part of the installation.

    found: the part's version or name; None if the part is missing.
    without: what happens without the part.
    is_broken: whether the part is installed but cannot be used.
    """

    name: str
    found: str | None
    without: str
    is_broken: bool = False


def parts() -> list[Part]:
    """All parts that a run's speed, memory or features depend on; never raises."""
    found = []
    for name, find, without in _PARTS:
        try:
            found.append(Part(name, find(), without))
        except ImportError:
            found.append(Part(name, None, without))
        except Exception as error:  # One broken package must not stop the checks of other parts.
            found.append(Part(name, f"broken: {' '.join(str(error).split())}", without, is_broken=True))
    return found


def _c_compiler() -> str | None:
    """The compiler that Triton would use."""
    return shutil.which(os.environ.get("CC", "gcc").split()[0]) or shutil.which("clang")


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _engine() -> str | None:
    if fault := here().engine_fault:
        raise RuntimeError(fault)
    return here().engine


_PARTS: tuple[tuple[str, Callable[[], str | None], str], ...] = (
    ("Python", lambda: sys.version.split()[0], ""),
    ("torch", lambda: torch.__version__, ""),
    ("megatron-core", lambda: importlib.metadata.version("megatron-core"), "nothing trains"),
    ("GPU", _gpu, "training can only use the CPU and gloo, which is enough for tests and trials"),
    (
        "NCCL",
        lambda: ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "no communication between GPUs",
    ),
    (
        "Transformer Engine",
        _engine,
        "Megatron's local layers are used (--transformer-impl local), without fp8 and without fused layer norm; "
        "unless --core-attention sdpa is given, their attention writes all scores to memory and does not support "
        "context parallelism",
    ),
    (
        "Apex: norms, optimizer",
        lambda: "installed" if here().apex else None,
        "local layers use PyTorch's norms; without Transformer Engine, Megatron also uses PyTorch's optimizer",
    ),
    (
        "Apex: accumulation",
        lambda: "fused_weight_gradient_mlp_cuda" if here().apex_accumulation else None,
        "megatron_vp's own kernel accumulates into main_grad; with PyTorch older than 2.10, it first rounds products "
        "to 16 bits",
    ),
    (
        "Apex: softmax",
        lambda: "scaled_masked_softmax_cuda" if here().apex_softmax else None,
        "local layers use PyTorch's softmax (--no-masked-softmax-fusion), unless --core-attention sdpa is given",
    ),
    (
        "Triton",
        lambda: importlib.metadata.version("triton"),
        "passes S and T run in eager PyTorch, which reads and writes the logits several times",
    ),
    (
        "C compiler",
        _c_compiler,
        "Triton compiles a small library when it first runs on a machine: unless a C compiler (gcc, clang or the one "
        "that CC names) and Python's headers are installed, passes S and T fail with an error",
    ),
    ("psutil", lambda: importlib.metadata.version("psutil"), "torch_dist checkpoints cannot be written"),
    (
        "tensorboard",
        lambda: importlib.metadata.version("tensorboard"),
        "loss curves cannot be written to --tensorboard-dir",
    ),
    ("SLURM", lambda: shutil.which("sbatch"), "jobs can be started with torchrun, but not submitted with sbatch"),
)
