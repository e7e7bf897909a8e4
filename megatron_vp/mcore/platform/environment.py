"""Lists the parts of this installation that a training run uses, and the consequence of each part that is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_vp.mcore.platform import triton_start
from megatron_vp.mcore.platform.flags import platform_arguments, uses_cpu
from megatron_vp.mcore.platform.installed import Installed, here
from megatron_vp.mcore.platform.parts import TITLES, parts_of_job

_BROKEN = "broken"


@dataclass(frozen=True)
class Part:
    """One part of the installation. `found` is the part's version or name, or None if the part is missing. `without`
    says what happens without the part.
    """

    name: str
    found: str | None
    without: str

    @property
    def is_broken(self) -> bool:
        """Whether the part is installed but cannot be used."""
        return (self.found or "").startswith(_BROKEN)


def parts() -> list[Part]:
    """All parts that a run's speed, memory or features depend on; never raises."""
    return [Part(name, _quietly(find), without) for name, find, without in _PARTS]


def who_computes() -> dict[str, str]:
    """Return the implementations that a bf16 job on this machine would use, for layers, norms, softmax, accumulation
    and the optimizer step.

    The job is assumed to set only `--bf16`, to use LayerNorm, and not to split backward passes. Raises UserError if
    such a job cannot start.
    """
    machine, cpu = here(), uses_cpu([])
    flags = platform_arguments([], cpu)
    job = argparse.Namespace(
        transformer_impl="local" if "local" in flags else "transformer_engine",
        gradient_accumulation_fusion="--no-gradient-accumulation-fusion" not in flags,
        masked_softmax_fusion="--no-masked-softmax-fusion" not in flags,
        normalization="LayerNorm",
        core_attention="megatron",
        bf16=True,
    )
    parts = parts_of_job(job, Installed() if cpu else machine, w_is_ours=False)
    return {part: TITLES[who] for part, who in parts.items()}


def _quietly(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except Exception as error:  # One broken package must not stop the checks of other parts.
        return None if isinstance(error, ImportError) else f"{_BROKEN}: {' '.join(str(error).split())}"


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


def _engine() -> str | None:
    machine = here()
    if machine.engine_fault:
        raise RuntimeError(machine.engine_fault)
    return machine.engine


def _apex() -> str | None:
    machine = here()
    if machine.apex_fault:
        raise RuntimeError(machine.apex_fault)
    return importlib.metadata.version("apex") if machine.apex else None


def _slurm() -> str | None:
    return shutil.which("sbatch")


def _index_builder() -> str | None:
    core = importlib.util.find_spec("megatron.core")  # Importing the package would take seconds.
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
    ("GPU", _gpu, "training can only use the CPU and gloo, which is enough for tests and trials"),
    ("NCCL", _nccl, "no communication between GPUs"),
    (
        "Transformer Engine",
        _engine,
        "Megatron's local layers are used (--transformer-impl local), without fp8 and without fused layer norm; "
        "unless --core-attention sdpa is given, their attention writes all scores to memory and does not support "
        "context parallelism",
    ),
    (
        "Apex: norms, optimizer",
        _apex,
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
        _package("triton", "triton"),
        "passes S and T run in eager PyTorch, which reads and writes the logits several times",
    ),
    (
        "C compiler",
        triton_start.c_compiler,
        "Triton compiles a small library when it first runs on a machine: unless Python's headers and a C compiler "
        "(gcc, clang or the one that CC names) are installed, passes S and T fail with an error",
    ),
    (
        "Triton's cache",
        triton_start.cache,
        "when training starts, all ranks of all nodes read and write compiled kernels over the network: set "
        "TRITON_CACHE_DIR to a folder on each node's own disk, such as /tmp/triton-$USER",
    ),
    (
        "hardware queues",
        _one_queue,
        "with CUDA_DEVICE_MAX_CONNECTIONS=1, a vocabulary collective that waits for its peers blocks the passes issued "
        "after it; only tensor and context parallelism need this setting",
    ),
    (
        "dataset index",
        _index_builder,
        "when Megatron first starts, it compiles its index helpers with make, a C++ compiler and pybind11",
    ),
    ("psutil", _package("psutil", "psutil"), "torch_dist checkpoints cannot be written"),
    ("tensorboard", _package("tensorboard", "tensorboard"), "loss curves cannot be written to --tensorboard-dir"),
    ("SLURM", _slurm, "jobs can be started with torchrun, but not submitted with sbatch"),
)
