"""Lists the parts of this installation that a training run uses, and the consequence of each part that is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_vp.mcore.platform.installed import here

_NETWORK = re.compile(
    "nfs4?|cifs|smb3|smbfs|9p|afs|ceph|glusterfs|lustre|gpfs|beegfs|panfs|wekafs|orangefs|pvfs2|vastnfs|quobyte|daos|"
    r"fuse(?!blk$|\.fuse-overlayfs$|\.squashfuse).*"
)
"""The types of network file systems. An unknown file system in user space is taken for one."""


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


def triton_cache() -> str:
    """Describe Triton's cache and its file system. Raises OSError if the cache is on a network file system."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()
    kind = _file_system(next(each for each in (folder, *folder.parents) if each.exists()))
    if _NETWORK.fullmatch(kind):
        raise OSError(f"{folder} is on a network file system ({kind})")
    return f"{folder} ({kind})"


def _file_system(folder: Path) -> str:
    told = subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True, check=False)
    return told.stdout.split()[-1] if told.stdout else "file system unknown"


def _c_compiler() -> str | None:
    """The compiler that Triton would use."""
    chosen = os.environ.get("CC")
    found = shutil.which(chosen.split()[0]) if chosen else shutil.which("gcc") or shutil.which("clang")
    if chosen and found is None:
        raise OSError(f"CC={chosen} is not a command on this machine: unset CC, or set it to a C compiler")
    headers = Path(sysconfig.get_paths()["include"])
    if found is not None and not (headers / "Python.h").is_file():
        raise OSError(f"{found} exists, but {headers}/Python.h does not: install Python's headers (python3-dev)")
    return found


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _unless(fault: str | None, found: str | None) -> str | None:
    if fault:
        raise RuntimeError(fault)
    return found


def _one_queue() -> str | None:
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return None if value == "1" else value or "unset"


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
        lambda: _unless(here().engine_fault, here().engine),
        "Megatron's local layers are used (--transformer-impl local), without fp8 and without fused layer norm; "
        "unless --core-attention sdpa is given, their attention writes all scores to memory and does not support "
        "context parallelism",
    ),
    (
        "Apex: norms, optimizer",
        lambda: _unless(here().apex_fault, "installed" if here().apex else None),
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
        "Triton compiles a small library when it first runs on a machine: unless Python's headers and a C compiler "
        "(gcc, clang or the one that CC names) are installed, passes S and T fail with an error",
    ),
    (
        "Triton's cache",
        triton_cache,
        "when training starts, all ranks of all nodes read and write compiled kernels over the network: set "
        "TRITON_CACHE_DIR to a folder on each node's own disk, such as /tmp/triton-$USER",
    ),
    (
        "hardware queues",
        _one_queue,
        "with CUDA_DEVICE_MAX_CONNECTIONS=1, a vocabulary collective that waits for its peers blocks the passes issued "
        "after it; only tensor and context parallelism need this setting",
    ),
    ("psutil", lambda: importlib.metadata.version("psutil"), "torch_dist checkpoints cannot be written"),
    (
        "tensorboard",
        lambda: importlib.metadata.version("tensorboard"),
        "loss curves cannot be written to --tensorboard-dir",
    ),
    ("SLURM", lambda: shutil.which("sbatch"), "jobs can be started with torchrun, but not submitted with sbatch"),
)
