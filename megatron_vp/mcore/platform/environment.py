"""Lists the parts of this installation that a training run uses, and the consequence of each part that is missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_vp.mcore.platform.installed import here

BROKEN = "broken: "


def parts() -> list[tuple[str, str, str]]:
    """All parts that a run's speed, memory or features depend on: name, version or fault, and the effect of the fault.
    Never raises.
    """
    effects = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    found = {name: _found(name) for name in effects}
    return [
        (name, found[name], effect if found[name] == "missing" or found[name].startswith(BROKEN) else "")
        for name, effect in effects.items()
    ]


def _found(name: str) -> str:
    try:
        return (_FIND[name]() if name in _FIND else importlib.metadata.version(name)) or "missing"
    except ImportError:
        return "missing"
    except Exception as error:  # One broken package must not stop the checks of other parts.
        return BROKEN + " ".join(str(error).split())


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


_FIND: dict[str, Callable[[], str | None]] = {
    "Python": lambda: sys.version.split()[0],
    "torch": lambda: torch.__version__,
    "GPU": _gpu,
    "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    "Transformer Engine": lambda: f"{BROKEN}{fault}" if (fault := here().engine_fault) else here().engine,
    "Apex": lambda: "with its extensions" if here().apex else None,
    "C compiler": lambda: shutil.which(os.environ.get("CC", "gcc").split()[0]) or shutil.which("clang"),
    "SLURM": lambda: shutil.which("sbatch"),
}
"""How parts are found that are not Python packages."""
