"""Applies the groups of patches for Megatron that `patch_table.toml` declares, in the runs that need them.

A patch names its replacement as a string. Our modules, and with them parts of Megatron, are imported only when the
patch is applied.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore import patches
from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.platform.installed import installed
from megatron_vp.mcore.settled import process, run_settings


@dataclass(frozen=True)
class PatchGroup:
    """Patches that are applied together, as `patch_table.toml` declares them.

    module: where the replacements are; a patch may name another one.
    patch: the fields of each Patch, with the name of its `make` or, if it does not need the original, of the
        replacement as `constant`. Several targets may share them.
    without: what happens in a run without the patches.
    given: the run gives one of these options.
    applies: a key of CONDITIONS, unless options are `given`.
    early: whether the patches are applied before Megatron parses the arguments, or after it has validated them.
    package: the package that owns the patched symbols; None for Megatron. If the package is not installed, the patches
        are neither checked nor applied.
    """

    name: str
    without: str
    module: str
    patch: Sequence[Mapping[str, Any]]
    given: Sequence[str] = ()
    applies: str = "always"
    early: bool = False
    package: str | None = None

    @property
    def sentence(self) -> str:
        """For which runs the patches are."""
        return f"only with {' or '.join(map(option_of, self.given))}" if self.given else self.applies

    @property
    def stage(self) -> str:
        """When the patches are applied."""
        return f"{'before Megatron parses' if self.early else 'after Megatron has validated'} the arguments"

    def needed(self, args: Arguments) -> bool:
        """Whether a run with these arguments needs the patches."""
        return bool(any(getattr(args, name) for name in self.given) if self.given else CONDITIONS[self.applies](args))

    def is_present(self) -> bool:
        """Whether the package that owns the patched symbols is installed."""
        try:
            return bool(importlib.import_module(self.package or "megatron.core"))
        except ImportError:
            return False

    def declared(self) -> tuple[Patch, ...]:
        """The patches that the present Megatron needs."""
        series = patches.present_series()
        every = (patch for record in self.patch for patch in _made(**{"module": self.module} | dict(record)))
        return tuple(patch for patch in every if series not in patch.unneeded_in)


def _made(
    target: str | list[str], module: str, reason: str, make: str = "", constant: str = "", **others: Any
) -> Iterator[Patch]:
    for each in [target] if isinstance(target, str) else target:
        yield Patch(each, f"{module}:{make or constant}", reason, constant=bool(constant), **others)


def _records(args: Arguments) -> object:
    return args.rank_report is not None or args.pipeline_trace is not None


def _in_own_loop(args: Arguments) -> bool:
    loop = process.own_loop
    return loop is not None and not loop.reads_arguments() and run_settings(args).replaces_schedule


def _with_bridges(module: str) -> bool:
    return process.own_loop is not None and f"megatron.bridge.{module}" in sys.modules


_MODELS, _CHECKPOINTS = "models.model_provider", "training.checkpointing"
CONDITIONS: dict[str, Callable[[Arguments], object]] = {
    "always": lambda args: True,
    "only if Transformer Engine is not installed": lambda args: not installed().engine,
    "only if Apex is not installed": lambda args: not installed().apex,
    "only if the run uses no CUDA device": lambda args: uses_cpu([]),
    "only in a replay with --shapes-only": lambda args: process.meter,
    "only in a replay with --shapes-only, if the job uses Transformer Engine's layers": (
        lambda args: process.counts_engine
    ),
    "only with --core-attention sdpa": lambda args: args.core_attention == "sdpa",
    "only with --vocab-parallel or a --pipeline-schedule other than 1f1b": (
        lambda args: run_settings(args).replaces_schedule
    ),
    "only with a --pipeline-schedule that has W passes": lambda args: run_settings(args).splits_backward,
    "only with Transformer Engine's layers and a --pipeline-schedule that has W passes": lambda args: (
        run_settings(args).splits_backward and args.transformer_impl == "transformer_engine" and installed().engine
    ),
    "only with a --pipeline-schedule that places chunks differently from Megatron": (
        lambda args: run_settings(args).places_chunks
    ),
    "only if Megatron's own schedule is recorded (--rank-report or --pipeline-trace)": (
        lambda args: _records(args) and not run_settings(args).replaces_schedule
    ),
    "only after `megatron_vp.enable`": lambda args: process.own_loop is not None,
    "except after `megatron_vp.enable`": lambda args: process.own_loop is None,
    "only after `megatron_vp.enable`, in a process that has imported Megatron-Bridge's models": (
        lambda args: _with_bridges(_MODELS)
    ),
    "only after `megatron_vp.enable` with vocab_parallel, in a process that has imported Megatron-Bridge's models": (
        lambda args: _with_bridges(_MODELS) and args.vocab_parallel
    ),
    "only after `megatron_vp.enable`, in a process that uses one of our schedules and does not let Megatron parse "
    "arguments": _in_own_loop,
    "only after `megatron_vp.enable`, in a process that uses one of our schedules and has imported Megatron-Bridge's "
    "training loop": lambda args: _in_own_loop(args) and _with_bridges(_CHECKPOINTS),
}
"""The conditions of `applies`. Until Megatron has parsed the arguments, they get those of `settled.early_arguments`."""

GROUPS = tuple(PatchGroup(**group) for group in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["group"])


def patches_of(name: str) -> tuple[Patch, ...]:
    """The patches of the group called `name`, for the installed Megatron."""
    return next(group for group in GROUPS if group.name == name).declared()


def selected(args: Arguments, early: bool | None = None) -> tuple[PatchGroup, ...]:
    """The groups that a run needs, in the order of the table; with `early`, only those that are applied then or not."""
    return tuple(group for group in GROUPS if early in (None, group.early) and group.needed(args))


def require_fit(args: Arguments) -> None:
    """Check all patches that a run needs, at any time of its start. Raises UserError if one does not fit."""
    patches.require_fit(_patches(selected(args)))


def apply(args: Arguments, early: bool) -> None:
    """Apply the patches that a run needs before or after Megatron has its arguments. If one does not fit, apply none
    and raise UserError.
    """
    patches.apply(_patches(selected(args, early)))


def apply_early(args: Arguments, *names: str) -> None:
    """Apply the patch groups in `names` that the run needs, earlier in startup than `apply` would. Raises UserError if
    a patch does not fit the installed packages.
    """
    patches.apply(_patches(group for group in selected(args) if group.name in names))


def _patches(groups: Iterable[PatchGroup]) -> list[Patch]:
    return [patch for group in groups for patch in group.declared()]
