"""Checks that Megatron's helpers for dataset indices are compiled, or can be compiled.

Megatron's wheel contains the compiled helpers. In a checkout, rank 0 compiles them on first use.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import Patch

_MODULE = "megatron.core.datasets.helpers_cpp"
_REMEDY = (
    "install it, compile the helpers yourself with `make -C {folder}`, or install megatron-core from its wheel, which "
    "contains the helpers"
)


def check_index_helpers() -> None:
    """Raise UserError if Megatron's helpers are not compiled and cannot be compiled on this machine."""
    if importlib.util.find_spec(_MODULE) is not None:
        return
    folder = _folder()
    compiler = os.environ.get("CXX", "g++")
    missing = [tool for tool in ("make", compiler, "python3", "python3-config") if shutil.which(tool) is None]
    if not missing and not _has_pybind11():
        missing = ["pybind11 (in the environment of the first python3 in PATH)"]
    if missing:
        raise UserError(
            f"Megatron in {folder} compiles its index helpers with {missing[0]}, which is not installed: "
            f"{_REMEDY.format(folder=folder)}"
        )


def _folder() -> str:
    from megatron.core import datasets

    return os.path.dirname(os.path.abspath(datasets.__file__))


def _has_pybind11() -> bool:
    return subprocess.run(["python3", "-m", "pybind11", "--includes"], capture_output=True, check=False).returncode == 0


def _compile_only_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec(_MODULE) is not None:
            return
        try:
            original()
        except SystemExit as error:
            raise UserError(
                f"Megatron could not compile its index helpers (the compiler's output is above): "
                f"{_REMEDY.format(folder=_folder()).removeprefix('install it, ')}"
            ) from error

    return compile_helpers


PATCHES = (
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        _compile_only_if_missing,
        "Megatron's wheel contains the compiled index helpers but no Makefile, so compiling them again would fail and "
        "end the job",
        "()",
    ),
)
