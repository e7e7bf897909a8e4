"""Checks patches against the installed Megatron, applies them, and undoes them.

A set of patches is applied completely or not at all: if one target has changed, an error names it. `patch_table.py`
declares which patches exist and when they are applied.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
class Variant:
    """How a patch differs in one release series of megatron-core."""

    signature: str
    make: Callable[[Any], Any] | None = None
    """The function that makes the replacement in the release series; None to use `Patch.make`."""


@dataclass(frozen=True)
class Patch:
    """Replaces one symbol.

    target: `module:attribute.path`; a class attribute is patched on the class, which affects every alias of the class.
    make: takes the original and returns the replacement; called once, when the patch is applied.
    reason: one line that `megatron-vp patches` shows.
    signature: the expected `signature_of(original)`. If the signature depends on another installed package, the
        alternatives are joined by " or ". The alternative `nothing` means that Megatron may lack the symbol.
    variants: differences by release series (such as `0.20`); None for a series that does not need the patch.
    """

    target: str
    make: Callable[[Any], Any]
    reason: str
    signature: str
    variants: Mapping[str, Variant | None] = field(default_factory=dict)

    def for_series(self, series: str) -> Patch | None:
        """Return this patch adapted to a release series, or None if the series does not need the patch."""
        if series not in self.variants:
            return self
        variant = self.variants[series]
        if variant is None:
            return None
        return replace(self, signature=variant.signature, make=variant.make or self.make, variants={})


@dataclass(frozen=True)
class Problem:
    """A symbol or an argument of the installed Megatron that is missing or not as we expect."""

    target: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.target} does not fit megatron_vp: expected {self.expected}, found {self.found} "
            f"(megatron_vp is tested with megatron-core {', '.join(TESTED_VERSIONS)})"
        )


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


def present_version() -> str:
    """Return the version of megatron-core that Python imports, supported or not. Raises UserError if megatron-core is
    not installed.
    """
    _distribution()
    # megatron-core appends "+<commit>" to its version if its files lie inside a git repository.
    return importlib.import_module("megatron.core").__version__.partition("+")[0]


def installed_version() -> str:
    """Return the version of megatron-core that Python imports. Raises UserError if it is missing or not supported."""
    require_supported(_distribution().version)
    # Python may import a copy of megatron-core that the metadata does not describe, such as a checkout on PYTHONPATH.
    module = present_version()
    if _series(module) not in SUPPORTED_SERIES:
        folder = importlib.import_module("megatron.core").__path__[0]
        raise UserError(
            f"{_refusal(module)}; Python imports this version from {folder} instead of the installed megatron-core "
            f"{_distribution().version}: remove the path to this copy from PYTHONPATH"
        )
    return module


def present_series() -> str:
    """Return the release series (such as `0.19`) of the megatron-core that Python imports, supported or not."""
    return _series(present_version())


def check(patches: Iterable[Patch]) -> list[Problem]:
    """Return one problem for each patch that cannot be applied, in the order of the patches."""
    return [problem for problem in map(_problem, patches) if problem is not None]


def check_symbol(target: str, expected: str) -> Problem | None:
    """Return how a symbol of Megatron differs from what we expect; None if it does not. If we patched the symbol, its
    original is compared.

    `expected` is a signature as `signature_of` returns it, `class` for any class, `present` for anything, or `takes a,
    b` for a callable that accepts these arguments by name and needs no others (`takes nothing` if it needs none at
    all).
    """
    try:
        owner, name = _locate(target)
        entry = _applied.get(target)
        found = getattr(owner, name) if entry is None else entry.original
    except (ImportError, AttributeError) as error:
        return Problem(target, expected, f"nothing ({error})")
    if expected == "present" or (expected == "class" and inspect.isclass(found)):
        return None
    if expected.startswith("takes "):
        names = expected.removeprefix("takes ")
        fits = _can_be_called(found, [] if names == "nothing" else names.split(", "))
    else:
        fits = signature_of(found) == expected
    return None if fits else Problem(target, expected, signature_of(found))


def apply(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Apply all patches, and return those that had not been applied before. If a patch does not fit the installed
    packages, apply none and raise UserError.
    """
    installed_version()
    targets = [patch.target for patch in patches]
    assert len(set(targets)) == len(targets), f"these targets are not all different: {sorted(targets)}"
    problems = check(patches)
    if problems:
        more = f"; and {len(problems) - 1} more, see `megatron-vp patches`" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}; nothing was patched")
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


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply patches inside this context. Patches that were already applied remain applied on exit."""
    new = apply(patches)
    try:
        yield
    finally:
        undo(new)


def in_force() -> tuple[Patch, ...]:
    """Return the patches that are currently applied, in the order in which they were applied."""
    return tuple(entry.patch for entry in _applied.values())


def require_supported(version: str) -> None:
    """Raise UserError for a release of megatron-core outside SUPPORTED_SERIES."""
    if _series(version) not in SUPPORTED_SERIES:
        raise UserError(
            f"{_refusal(version)}; to install a supported release without changing other packages, run `{INSTALL}`"
        )


def _refusal(version: str) -> str:
    series = " and ".join(f"{series}.x" for series in SUPPORTED_SERIES)
    return (
        f"megatron-core {version} is not supported: the patches are made for {series} "
        f"(tested with {', '.join(TESTED_VERSIONS)})"
    )


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"megatron-core is not installed: run `pip install megatron-core[training]=={RELEASE}`"
        ) from None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _can_be_called(value: Any, names: list[str]) -> bool:
    try:
        inspect.signature(value).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


def _problem(patch: Patch) -> Problem | None:
    try:
        owner, name = _locate(patch.target)
        current = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        absent = f"nothing ({error})"
        may_lack = isinstance(error, AttributeError) and "nothing" in patch.signature.split(" or ")
        return None if may_lack else Problem(patch.target, patch.signature, absent)
    entry = _applied.get(patch.target)
    if entry is None:
        found = signature_of(current)
        return None if found in patch.signature.split(" or ") else Problem(patch.target, patch.signature, found)
    if entry.patch != patch:
        return Problem(patch.target, "an unpatched symbol", f"a symbol with another patch: {entry.patch.reason}")
    if inspect.getattr_static(owner, name) is not entry.replacement:
        return Problem(patch.target, "our replacement", "an object that other code assigned later")
    return None


def _locate(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _prepare(patch: Patch) -> _Applied:
    owner, name = _locate(patch.target)
    raw = vars(owner).get(name, _MISSING)
    original = getattr(owner, name, None)
    static = inspect.getattr_static(owner, name, None)
    if isinstance(static, staticmethod):
        replacement = staticmethod(patch.make(original))
    elif isinstance(static, classmethod):
        replacement = classmethod(patch.make(static.__func__))
    else:
        replacement = patch.make(original)
    return _Applied(patch, owner, name, raw, original, replacement)
