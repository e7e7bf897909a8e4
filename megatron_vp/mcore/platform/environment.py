"""Which parts a training run would use here, which are missing, and what their absence costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Part:
    """One part of the installation: `found` says which, or is None; `without` says what its absence means."""

    name: str
    found: str | None
    without: str


def parts() -> list[Part]:
    """Everything that a run's speed, memory or features depend on; never raises."""
    return [Part(name, _quietly(find), without) for name, find, without in _PARTS]


def _quietly(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except Exception as error:  # a broken installation is as good as none, and must not hide the other parts
        return None if isinstance(error, ImportError) else f"broken: {' '.join(str(error).split())}"


def _package(name: str, module: str) -> Callable[[], str | None]:
    def find() -> str | None:
        return importlib.metadata.version(name) if importlib.util.find_spec(module) else None

    return find


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _slurm() -> str | None:
    return shutil.which("sbatch")


def _index_builder() -> str | None:
    core = importlib.util.find_spec("megatron.core")  # found, not imported: that takes seconds
    compiled = [
        file for folder in core.submodule_search_locations for file in Path(folder).glob("datasets/helpers_cpp*")
    ]
    return "compiled" if compiled else None


def _one_queue() -> str | None:
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return None if value == "1" else value or "unset"


_PARTS: tuple[tuple[str, Callable[[], str | None], str], ...] = (
    ("Python", lambda: sys.version.split()[0], ""),
    ("torch", lambda: torch.__version__, ""),
    ("megatron-core", lambda: importlib.metadata.version("megatron-core"), "nothing trains"),
    ("GPU", _gpu, "training runs on CPU processes over gloo: for tests and trials"),
    ("NCCL", _nccl, "no communication between GPUs"),
    (
        "Transformer Engine",
        _package("transformer-engine", "transformer_engine"),
        "local layers (--transformer-impl local): no fp8, no fused layer norm; their attention writes all scores to "
        "memory and takes whole sequences, without context parallelism, unless --core-attention sdpa is given",
    ),
    (
        "Apex",
        _package("apex", "apex"),
        "local layers use torch's norms; their weight gradients are added to main_grad in a pass of their own "
        "(--no-gradient-accumulation-fusion)",
    ),
    (
        "Triton",
        _package("triton", "triton"),
        "S and T run on eager PyTorch, which moves the logits several times",
    ),
    (
        "hardware queues",
        _one_queue,
        "CUDA_DEVICE_MAX_CONNECTIONS=1: a vocabulary collective that waits for its peers holds up the passes behind "
        "it; only tensor and context parallelism ask for it",
    ),
    (
        "dataset index",
        _index_builder,
        "Megatron compiles its index builder at the first start, which needs make and a C++ compiler",
    ),
    ("psutil", _package("psutil", "psutil"), "torch_dist checkpoints cannot be written"),
    ("tensorboard", _package("tensorboard", "tensorboard"), "no loss curves on disk (--tensorboard-dir)"),
    ("SLURM", _slurm, "start with torchrun; the files in scripts/slurm need sbatch"),
)
