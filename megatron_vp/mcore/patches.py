"""Checks patches against the installed Megatron, applies them, and undoes them.

A set of patches is applied completely or not at all: if one target has changed, an error names it. `patch_table.py`
declares which patches exist and when they are applied.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError

SUPPORTED_SERIES = ("0.19", "0.20")
TESTED_VERSIONS = ("0.19.0", "0.19.2", "0.20 development line at d98e8a64")
RELEASE = "0.19.2"
"""The newest tested release on PyPI."""
INSTALL = f"pip install --no-deps megatron-core=={RELEASE}"
"""The command that installs RELEASE without its dependencies, for environments such as NVIDIA's container."""

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """Replaces one symbol.

    target: `module:attribute.path`; a class attribute is patched on the class, which affects every alias of the class.
    make: takes the original and returns the replacement; called once, when the patch is applied. If `constant`, it is
        the replacement itself. A text `module:name` names either.
    reason: one line that `megatron-vp patches` shows.
    also: signatures that fit in addition to the one that `scripts/lock_megatron.py` recorded, joined by " or ", if the
        signature depends on another installed package. `nothing` means that Megatron may lack the symbol.
    unneeded_in: the release series of megatron-core that do not need the patch.
    """

    target: str
    make: Any
    reason: str
    also: str = ""
    unneeded_in: Sequence[str] = ()
    constant: bool = False


@dataclass(frozen=True)
class _Applied:
    """The data needed to undo a patch. `raw` is the entry in the owner's `__dict__`, or _MISSING if there is none."""

    patch: Patch
    owner: Any
    name: str
    raw: Any
    original: Any
    replacement: Any


_applied: dict[str, _Applied] = {}


def signature_of(value: Any) -> str:
    """Return the parameters of a callable as `(a, b=1, *, c)`, without annotations, which do not affect callers.

    Returns `builtin` if Python cannot determine the parameters, and `value` for an object that is not callable.
    """
    if not callable(value):
        return "value"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "builtin"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def original_of(target: str) -> Any:
    """Return a symbol, or its original if we patched it. Raises ImportError or AttributeError if it is missing."""
    owner, name = _locate(target)
    entry = _applied.get(target)
    return getattr(owner, name) if entry is None else entry.original


def present_version() -> str:
    """Return the version of megatron-core that Python imports, supported or not. Raises UserError if megatron-core is
    not installed.
    """
    try:
        # megatron-core appends "+<commit>" to its version if its files lie inside a git repository.
        return importlib.import_module("megatron.core").__version__.partition("+")[0]
    except ModuleNotFoundError:
        raise UserError(
            f"megatron-core is not installed: run `pip install megatron-core[training]=={RELEASE}`"
        ) from None


def installed_version() -> str:
    """Return the version of megatron-core that Python imports. Raises UserError if it is missing or not supported."""
    version = present_version()
    if present_series() not in SUPPORTED_SERIES:
        raise UserError(
            f"megatron-core {version} in {importlib.import_module('megatron.core').__path__[0]} is not supported: the "
            f"patches are made for {' and '.join(f'{series}.x' for series in SUPPORTED_SERIES)} (tested with "
            f"{', '.join(TESTED_VERSIONS)}); to install a supported release without changing other packages, run "
            f"`{INSTALL}`"
        )
    return version


def present_series() -> str:
    """Return the release series (such as `0.19`) of the megatron-core that Python imports, supported or not."""
    return ".".join(present_version().split(".")[:2])


def lock_file() -> Path:
    """The file that `scripts/lock_megatron.py` writes for the megatron-core that Python imports."""
    return Path(__file__).with_name(f"megatron_{present_series()}.txt")


def locked(kind: str) -> dict[str, str]:
    """Return what the lock file records of a kind of symbol or argument: a description by name.

    A release series without a file is compared with the newest supported one.
    """
    file = lock_file()
    return _recorded(file if file.exists() else file.with_name(f"megatron_{SUPPORTED_SERIES[-1]}.txt")).get(kind, {})


@cache
def _recorded(file: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in file.read_text().splitlines():
        kind, name, *what = line.split(" ", 2)
        found.setdefault(kind, {})[name] = "".join(what)
    return found


def misfit(target: str, expected: str, found: str) -> str:
    """One line about a symbol or an argument of the installed Megatron that is missing or not as we expect."""
    tested = f"megatron_vp is tested with megatron-core {', '.join(TESTED_VERSIONS)}"
    return f"{target} does not fit megatron_vp: expected {expected}, found {found} ({tested})"


def fault(patch: Patch) -> str | None:
    """One line that says why a patch cannot be applied; None if it can."""
    entry = _applied.get(patch.target)
    expected = " or ".join(filter(None, (locked("patched").get(patch.target), patch.also)))
    try:
        owner, name = _locate(patch.target)
        found = signature_of(getattr(owner, name))
    except AttributeError:
        found = "nothing"
    except ImportError as error:
        found = f"nothing ({error})"
    else:
        if entry is not None:
            expected = found = "our replacement"
            if inspect.getattr_static(owner, name) is not entry.replacement:
                found = "an object that other code assigned later"
    return None if found in expected.split(" or ") else misfit(patch.target, expected, found)


def require_fit(patches: Iterable[Patch]) -> None:
    """Raise UserError if a patch cannot be applied."""
    for said in filter(None, map(fault, patches)):
        raise UserError(f"{said}; no patch was applied: `megatron-vp patches` lists everything that does not fit")


def apply(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Apply all patches, and return those that had not been applied before. If a patch does not fit the installed
    packages, apply none and raise UserError.
    """
    installed_version()
    require_fit(patches)
    new = [_prepare(patch) for patch in patches if patch.target not in _applied]
    for entry in new:
        setattr(entry.owner, entry.name, entry.replacement)
        _applied[entry.patch.target] = entry
    return tuple(entry.patch for entry in new)


def undo(patches: Iterable[Patch]) -> None:
    """Restore the originals. Patches that are not applied are ignored."""
    for patch in reversed(tuple(patches)):
        entry = _applied.pop(patch.target, None)
        if entry is None:
            continue
        if entry.raw is _MISSING:
            delattr(entry.owner, entry.name)
        else:
            setattr(entry.owner, entry.name, entry.raw)


def in_force() -> tuple[Patch, ...]:
    """Return the patches that are currently applied, in the order in which they were applied."""
    return tuple(entry.patch for entry in _applied.values())


def _locate(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def resolved(make: Any) -> Any:
    """Import what a text `module:name` names; anything else stands for itself."""
    module, _, name = make.partition(":") if isinstance(make, str) else ("", "", "")
    return getattr(importlib.import_module(module), name) if module else make


def _prepare(patch: Patch) -> _Applied:
    owner, name = _locate(patch.target)
    raw = vars(owner).get(name, _MISSING)
    original = getattr(owner, name, None)
    static = inspect.getattr_static(owner, name, None)
    kind = type(static) if isinstance(static, staticmethod | classmethod) else None
    make = resolved(patch.make)
    made = make if patch.constant else make(static.__func__ if kind is classmethod else original)
    replacement = made if kind is None else kind(made)
    return _Applied(patch, owner, name, raw, original, replacement)
