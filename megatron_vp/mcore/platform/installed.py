"""Finds the installed packages and compiled extensions that decide which code Megatron runs.

We try to import `transformer_engine.pytorch`, as Megatron does, and look for the extensions of NVIDIA's Apex. The name
of a package is not enough: PyPI's `transformer-engine` without an extra raises an error on import, and Apex built
without its extensions contains only Python code. Apex counts as installed only with all extensions that Megatron uses.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_vp import __version__
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.patches import present_version

INSTALL_ENGINE = 'pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]==2.17.1"'
"""Command that builds Transformer Engine for the installed PyTorch. This version was tested with Megatron 0.19."""

_ENGINE = "transformer_engine"
_APEX_MODULES = (
    *("apex", "amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"),
    *("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"),
)
_IN_NODES = {
    "te": r"no|\d+(\.\d+)*((a|b|rc|\.dev|\.post)\d+)?(\+[\w.]+)?",
    "cc": r"\d{1,2}\.\d",
    "apex": "yes|no",
}
"""The entries of `--nodes` and the values that they may have."""


@dataclass(frozen=True)
class Installed:
    """The packages installed on a machine, other than PyTorch and Megatron."""

    engine: str | None = None
    """The version of Transformer Engine; None if `transformer_engine.pytorch` cannot be imported."""
    engine_fault: str | None = None
    """Why the installed Transformer Engine cannot be imported; None if it can be imported or is not installed."""
    apex: bool = False
    """Whether Apex is installed with the extensions that Megatron uses."""
    capability: tuple[int, int] | None = None
    """The compute capability that --nodes gives for the GPUs; None if it gives none."""


of_nodes: Installed | None = None
"""The packages of the job's nodes if this machine only checks the job (`pretend_gpu.py`); None if the job runs here."""

_hidden: dict[str, str] = {}


def installed() -> Installed:
    """The packages of the machine on which the job runs."""
    return here() if of_nodes is None else of_nodes


def lacks(module: str) -> bool:
    """Whether the job will not find a package. A job's other nodes are expected to have it."""
    return of_nodes is None and not _is_there(module)


def here() -> Installed:
    """The packages of this machine. This call imports Transformer Engine, as Megatron does anyway.

    If the import fails, the package is hidden from later imports: Megatron handles an ImportError but no other error.
    """
    return Installed(*_engine(), apex=all(map(_is_there, _APEX_MODULES)))


def versions() -> dict[str, str | None]:
    """The versions of the packages that determine a run's results; None for a package that is not installed."""
    return {
        "megatron_vp": __version__,
        "megatron-core": present_version(),
        "torch": torch.__version__,
        "Transformer Engine": here().engine,
    }


def hide_what_needs_a_gpu() -> None:
    """Hide Transformer Engine and Apex, whose norms and optimizers Megatron would otherwise use even on a CPU."""
    for package in filter(_is_there, (_ENGINE, *_APEX_MODULES)):
        _hide(package, "the package's kernels need a GPU")


def _hide(package: str, reason: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None  # imports raise ModuleNotFoundError
    _hidden[package] = reason


def from_text(text: str) -> Installed:
    """Parse `--nodes "te=VERSION|no,apex=yes|no,cc=X.Y"`, which describes a job's nodes.

    Entries that are missing from the text take the values of this machine. Raises UserError.
    """
    given = dict(word.strip().partition("=")[::2] for word in text.split(","))
    if not all(value and re.fullmatch(_IN_NODES.get(name, ""), value) for name, value in given.items()):
        raise UserError(f"--nodes {text} cannot be parsed: use te=2.17.1 or te=no, apex=yes or apex=no, and cc=9.0")
    changed: dict[str, Any] = {}
    if "te" in given:
        changed |= {"engine": None if given["te"] == "no" else given["te"], "engine_fault": None}
    if "apex" in given:
        changed["apex"] = given["apex"] == "yes"
    if "cc" in given:
        changed["capability"] = tuple(map(int, given["cc"].split(".")))
    return replace(here(), **changed)


def _engine() -> tuple[str | None, str | None]:
    """Return Transformer Engine's version and fault. The version is None if the package cannot be imported. The fault
    tells why an installed package cannot be imported, and is None otherwise.
    """
    if _ENGINE in _hidden:
        return None, _hidden[_ENGINE]
    if not _is_there(_ENGINE):
        return None, None
    try:
        importlib.import_module(f"{_ENGINE}.pytorch")
        return importlib.import_module(_ENGINE).__version__, None
    except Exception as error:  # Transformer Engine's loader may raise any exception.
        words = " ".join(str(error).split()) or type(error).__name__
        _hide(_ENGINE, words.partition(". ")[0].rstrip(".!"))
        return None, _hidden[_ENGINE]


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


TITLES = {
    "te": "Transformer Engine",
    "local": "Megatron's local layers",
    "apex": "Apex",
    "torch": "PyTorch",
    "megatron_vp": "megatron_vp",
    "unfused": "PyTorch, with a separate addition to main_grad",
}


def parts_of_job(args: Arguments, machine: Installed, w_is_ours: bool) -> dict[str, str]:
    """Return which implementation (a key of TITLES) the job uses for layers, norms, softmax, accumulation of weight
    gradients, and the optimizer step.

    `w_is_ours` says whether a pass W computes the weight gradients of local layers.
    """
    local, apex = args.transformer_impl == "local", "apex" if machine.apex else None
    norm = softmax = accumulation = "te"
    if local:
        fused = args.masked_softmax_fusion and args.core_attention == "megatron" and (args.bf16 or args.fp16)
        norm = (args.normalization == "LayerNorm" and apex) or "torch"
        softmax = (fused and apex) or "torch"
        accumulation = apex or "megatron_vp"
    if local and w_is_ours:
        accumulation = "megatron_vp"
    elif not args.gradient_accumulation_fusion:
        accumulation = "unfused"
    return {
        "layers": "local" if local else "te",
        "norm": norm,
        "softmax": softmax,
        "accumulation": accumulation,
        "optimizer": "te" if machine.engine else apex or "torch",
    }


def describe(parts: dict[str, str]) -> str:
    """Describe in one line what implements each part."""
    return "; ".join(f"{part}: {TITLES[who]}" for part, who in parts.items())
