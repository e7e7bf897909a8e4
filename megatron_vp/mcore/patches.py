"""Declared patches: what of Megatron is replaced, why, and whether the installed Megatron still fits.

A patch names its target as `module:attribute.path`, makes the replacement from the original, and states the signature
that it was written against. A set of patches is applied together or not at all, is applied once however often it is
asked for, and can be undone. A target that changed is an error that names it; nothing is ever skipped in silence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_vp.errors import UserError

SUPPORTED_SERIES = ("0.19",)
TESTED_VERSIONS = ("0.19.0", "0.19.2")

GROUPS = {
    "wheel": "megatron_vp.mcore.platform.cpu:WHEEL_PATCHES",
    "torch norms": "megatron_vp.mcore.platform.without_transformer_engine:NORM_PATCHES",
    "no transformer engine": "megatron_vp.mcore.platform.without_transformer_engine:PATCHES",
    "no fused accumulation": "megatron_vp.mcore.platform.without_apex:PATCHES",
    "arguments": "megatron_vp.mcore.options.arguments:PATCHES",
    "checkpoint files": "megatron_vp.mcore.storage.checkpoint_files:PATCHES",
    "parameter groups": "megatron_vp.mcore.storage.parameter_groups:PATCHES",
    "chunk data": "megatron_vp.mcore.training.chunk_data:PATCHES",
    "heterogeneous layers": "megatron_vp.mcore.model.heterogeneous:PATCHES",
    "same job": "megatron_vp.mcore.start.same_job:PATCHES",
    "cpu platform": "megatron_vp.mcore.platform.cpu:PATCHES",
    "pipeline schedule": "megatron_vp.mcore.training.vocab_patches:SCHEDULE_PATCHES",
    "vocabulary parallelism": "megatron_vp.mcore.training.vocab_patches:PATCHES",
    "split backward": "megatron_vp.mcore.model.split_backward:PATCHES",
    "delayed weight gradients": "megatron_vp.mcore.model.delayed_weights:PATCHES",
    "chunk placement": "megatron_vp.mcore.model.chunk_layout:PATCHES",
    "rank report": "megatron_vp.mcore.reports.rank_report:PLAIN_PATCHES",
    "curves": "megatron_vp.mcore.reports.curves:PATCHES",
    "flash attention": "megatron_vp.mcore.model.attention:PATCHES",
    "replay": "megatron_vp.mcore.replay.one_rank:PATCHES",
    "shapes only": "megatron_vp.mcore.replay.shapes_only:PATCHES",
}
WHEN = {
    "wheel": "always",
    "torch norms": "always",
    "no transformer engine": "where Transformer Engine is not installed",
    "no fused accumulation": "where Apex's fused_weight_gradient_mlp_cuda is not installed",
    "arguments": "always",
    "checkpoint files": "always",
    "parameter groups": "only with --override-opt-param-scheduler or --use-checkpoint-opt-param-scheduler",
    "chunk data": "only with --iterations-to-skip or --multiple-validation-sets",
    "heterogeneous layers": "only with --heterogeneous-layers-config-path and several chunks per rank",
    "same job": "always",
    "cpu platform": "only where no CUDA device is used",
    "pipeline schedule": "only with --vocab-parallel or a --pipeline-schedule other than 1f1b",
    "vocabulary parallelism": "only with --vocab-parallel",
    "split backward": "only with a --pipeline-schedule that has W passes",
    "delayed weight gradients": "only with a --pipeline-schedule that has W passes and Transformer Engine's layers",
    "chunk placement": "only with a --pipeline-schedule that places chunks otherwise than Megatron",
    "rank report": "only with --rank-report and Megatron's own schedule",
    "curves": "only with --tensorboard-dir, on the rank that writes there",
    "flash attention": "only with --core-attention sdpa",
    "replay": "only in `megatron-vp replay`, with --fake-process-group",
    "shapes only": "only in `megatron-vp replay --shapes-only`",
}

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced symbol.

    target: `module:attribute.path`; a class attribute is patched on the class, so every alias of the class sees it.
    make: gets the original, returns the replacement. Called once, when the patch is applied.
    reason: one line, shown by `megatron-vp patches`.
    signature: `signature_of(original)` at the time of writing; two joined by " or " where other packages decide which;
        `nothing` for a symbol that Megatron lacks where another package is missing.
    series: Megatron-Core release series that the patch is made for.
    """

    target: str
    make: Callable[[Any], Any]
    reason: str
    signature: str
    series: tuple[str, ...] = SUPPORTED_SERIES


@dataclass(frozen=True)
class Problem:
    """Why a patch (or, with the target `megatron-core`, the whole installation) does not fit."""

    target: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.target} does not fit: expected {self.expected}, found {self.found} "
            f"(tested with megatron-core {', '.join(TESTED_VERSIONS)})"
        )


@dataclass(frozen=True)
class _Applied:
    """What is needed to take a patch back: `raw` is the owner's own entry, or _MISSING where it was inherited."""

    patch: Patch
    owner: Any
    name: str
    raw: Any
    original: Any
    replacement: Any


_applied: dict[str, _Applied] = {}


def signature_of(value: Any) -> str:
    """Parameters of a callable as `(a, b=1, *, c)`, `builtin` where Python cannot tell, `value` if it is no callable.

    Annotations are left out: they change without changing what a call means.
    """
    if not callable(value):
        return "value"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "builtin"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def installed_version() -> str:
    """Version of the installed megatron-core; UserError if there is none or it is in no supported series."""
    try:
        distribution = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"megatron-core is not installed; install megatron-core[training]=={TESTED_VERSIONS[-1]}"
        ) from None
    require_supported(distribution)
    # The module may be another copy than the one that the metadata describes (an editable checkout on the path). It
    # adds "+<commit>" when its files lie inside somebody's git repository.
    module = importlib.import_module("megatron.core").__version__.partition("+")[0]
    require_supported(module)
    return module


def check(patches: Iterable[Patch]) -> list[Problem]:
    """Everything that keeps these patches from being applied, in their order; empty if they all fit.

    Raises UserError for an unsupported Megatron, whose symbols say nothing about the patches.
    """
    series = ".".join(installed_version().split(".")[:2])
    problems = []
    for patch in patches:
        problem = _problem(patch, series)
        if problem is not None:
            problems.append(problem)
    return problems


def apply(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Apply all of them or, raising UserError, none; return those that were not in force before."""
    targets = [patch.target for patch in patches]
    assert len(set(targets)) == len(targets), f"two patches share a target: {sorted(targets)}"
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
    """Put the originals back. Patches that are not in force are left alone."""
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
    """Apply on entry; on exit undo what this entry applied (patches already in force stay)."""
    new = apply(patches)
    try:
        yield
    finally:
        undo(new)


def in_force() -> tuple[Patch, ...]:
    """The patches that are applied now, in the order of application."""
    return tuple(entry.patch for entry in _applied.values())


def group(name: str) -> tuple[Patch, ...]:
    """The patches of one group of GROUPS; imports the module that declares them, and with it parts of Megatron."""
    module, _, attribute = GROUPS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def all_patches() -> list[tuple[str, Patch]]:
    """Every declared patch with the name of its group."""
    return [(name, patch) for name in GROUPS for patch in group(name)]


def require_supported(version: str) -> None:
    """Raise UserError for a release of megatron-core outside SUPPORTED_SERIES."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED_SERIES:
        raise UserError(
            f"megatron-core {version} is not supported: the patches are made for {', '.join(SUPPORTED_SERIES)}.x "
            f"(tested with {', '.join(TESTED_VERSIONS)}); install megatron-core=={TESTED_VERSIONS[-1]}"
        )


def _problem(patch: Patch, series: str) -> Problem | None:
    if series not in patch.series:
        return Problem(patch.target, f"megatron-core {', '.join(patch.series)}", f"megatron-core {series}")
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
    if entry.patch is not patch:
        return Problem(patch.target, "an unpatched symbol", f"another patch in force: {entry.patch.reason}")
    if inspect.getattr_static(owner, name) is not entry.replacement:
        return Problem(patch.target, "our replacement", "something that was put in its place later")
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
