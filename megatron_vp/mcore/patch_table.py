"""The table of patches: every group that we apply to Megatron, for which runs, and when in the start.

A group names the module that declares its patches as text, so that this table imports no part of Megatron. Other rooms
ask only for the groups of a stage that a run selects. `megatron-vp patches` and the documentation print the table.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from megatron_vp.errors import UserError
from megatron_vp.mcore import patches
from megatron_vp.mcore.choices import counts_engine, places_chunks, replaces_schedule, splits_backward
from megatron_vp.mcore.patches import Patch, Problem
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.platform.installed import Installed, installed
from megatron_vp.mcore.reports import memory


class Stage(Enum):
    """When in the start a group is applied. All groups that a run selects are checked before the first stage."""

    BEFORE_PARSING = "before Megatron parses the arguments"
    AFTER_VALIDATION = "after Megatron validated the arguments"


@dataclass(frozen=True)
class Run:
    """What decides which groups apply: a run's arguments and where it runs."""

    args: argparse.Namespace
    """Megatron's arguments; before they are parsed, those of `options.early_arguments`, which conditions may read."""
    machine: Installed
    """What is installed where the job runs."""
    cpu: bool = False
    """No CUDA device is used."""
    shapes_only: bool = False
    """This is a replay of shapes."""
    counts_engine: bool = False
    """It counts Transformer Engine's layers."""


def run_here(args: argparse.Namespace) -> Run:
    """The run of this process."""
    return Run(
        args,
        installed(),
        cpu=uses_cpu([]),
        shapes_only=memory.of_shapes is not None,
        counts_engine=counts_engine(),
    )


@dataclass(frozen=True)
class Condition:
    """For which runs a group applies: the sentence that users read, and the test."""

    sentence: str
    holds: Callable[[Run], object]


ALWAYS = Condition("always", lambda run: True)


@dataclass(frozen=True)
class PatchGroup:
    """Patches that are applied together.

    patches: `module:attribute` of a tuple of patches.
    applies: the runs that need them.
    stage: when in the start they are applied.
    """

    name: str
    patches: str
    applies: Condition
    stage: Stage

    def for_series(self, series: str) -> tuple[Patch, ...]:
        """The patches for a release series; imports the module that declares them, and with it parts of Megatron."""
        module, _, attribute = self.patches.partition(":")
        declared: tuple[Patch, ...] = getattr(importlib.import_module(module), attribute)
        return tuple(each for patch in declared if (each := patch.for_series(series)) is not None)


# The order is the order in which the patches of a stage are applied.
GROUPS = (
    PatchGroup(
        "wheel",
        "megatron_vp.mcore.platform.cpu:WHEEL_PATCHES",
        ALWAYS,
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "torch norms",
        "megatron_vp.mcore.platform.without_transformer_engine:NORM_PATCHES",
        ALWAYS,
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "arguments",
        "megatron_vp.mcore.options.arguments:PATCHES",
        ALWAYS,
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "checkpoint files",
        "megatron_vp.mcore.storage.checkpoint_files:PATCHES",
        ALWAYS,
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "same job",
        "megatron_vp.mcore.start.same_job:PATCHES",
        ALWAYS,
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "no transformer engine",
        "megatron_vp.mcore.platform.without_transformer_engine:PATCHES",
        Condition("where Transformer Engine is not installed", lambda run: not run.machine.engine),
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "no fused accumulation",
        "megatron_vp.mcore.platform.without_apex:PATCHES",
        Condition(
            "where Apex's fused_weight_gradient_mlp_cuda is not installed",
            lambda run: not run.machine.apex_accumulation,
        ),
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "cpu platform",
        "megatron_vp.mcore.platform.cpu:PATCHES",
        Condition("only where no CUDA device is used", lambda run: run.cpu),
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "replay",
        "megatron_vp.mcore.replay.one_rank:PATCHES",
        Condition("only in a replay, with --fake-process-group", lambda run: run.args.fake_process_group),
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "shapes only",
        "megatron_vp.mcore.replay.shapes_only:PATCHES",
        Condition("only in a replay with --shapes-only", lambda run: run.shapes_only),
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "shapes of Transformer Engine",
        "megatron_vp.mcore.replay.device_kernels:ENGINE_PATCHES",
        Condition(
            "only in a replay with --shapes-only that counts Transformer Engine's layers",
            lambda run: run.counts_engine,
        ),
        Stage.BEFORE_PARSING,
    ),
    PatchGroup(
        "curves",
        "megatron_vp.mcore.reports.curves:PATCHES",
        Condition(
            "only with --tensorboard-dir, on the rank that writes there",
            lambda run: run.args.tensorboard_dir and run.args.rank == run.args.world_size - 1,
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "parameter groups",
        "megatron_vp.mcore.storage.parameter_groups:PATCHES",
        Condition(
            "only with --override-opt-param-scheduler or --use-checkpoint-opt-param-scheduler",
            lambda run: run.args.override_opt_param_scheduler or run.args.use_checkpoint_opt_param_scheduler,
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "chunk data",
        "megatron_vp.mcore.training.chunk_data:PATCHES",
        Condition(
            "only with --iterations-to-skip or --multiple-validation-sets",
            lambda run: run.args.iterations_to_skip or run.args.multiple_validation_sets,
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "heterogeneous layers",
        "megatron_vp.mcore.model.heterogeneous:PATCHES",
        Condition(
            "only with --heterogeneous-layers-config-path or --heterogeneous-layers-config-encoded-json",
            lambda run: run.args.heterogeneous_layers_config_path or run.args.heterogeneous_layers_config_encoded_json,
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "flash attention",
        "megatron_vp.mcore.model.attention:PATCHES",
        Condition("only with --core-attention sdpa", lambda run: run.args.core_attention == "sdpa"),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "vocabulary parallelism",
        "megatron_vp.mcore.training.vocab_patches:PATCHES",
        Condition("only with --vocab-parallel", lambda run: run.args.vocab_parallel),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "pipeline schedule",
        "megatron_vp.mcore.training.vocab_patches:SCHEDULE_PATCHES",
        Condition(
            "only with --vocab-parallel or a --pipeline-schedule other than 1f1b",
            lambda run: replaces_schedule(run.args),
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "split backward",
        "megatron_vp.mcore.model.split_backward:PATCHES",
        Condition("only with a --pipeline-schedule that has W passes", lambda run: splits_backward(run.args)),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "delayed weight gradients",
        "megatron_vp.mcore.model.delayed_weights:PATCHES",
        Condition(
            "only with a --pipeline-schedule that has W passes and Transformer Engine's layers",
            lambda run: (
                splits_backward(run.args) and run.args.transformer_impl == "transformer_engine" and run.machine.engine
            ),
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "chunk placement",
        "megatron_vp.mcore.model.chunk_layout:PATCHES",
        Condition(
            "only with a --pipeline-schedule that places chunks otherwise than Megatron",
            lambda run: places_chunks(run.args),
        ),
        Stage.AFTER_VALIDATION,
    ),
    PatchGroup(
        "rank report",
        "megatron_vp.mcore.reports.rank_report:PLAIN_PATCHES",
        Condition(
            "only with --rank-report and Megatron's own schedule",
            lambda run: run.args.rank_report is not None and not replaces_schedule(run.args),
        ),
        Stage.AFTER_VALIDATION,
    ),
)


def patches_of(name: str) -> tuple[Patch, ...]:
    """The patches of one group for the Megatron that is here."""
    return next(group for group in GROUPS if group.name == name).for_series(patches.present_series())


def selected(run: Run, stage: Stage | None = None) -> tuple[PatchGroup, ...]:
    """The groups that a run needs, of one stage or of all, in the order of the table."""
    return tuple(group for group in GROUPS if stage in (None, group.stage) and group.applies.holds(run))


def check(groups: Iterable[PatchGroup]) -> list[Problem]:
    """Everything that keeps these groups from being applied to the Megatron that is here; empty if they all fit."""
    series = patches.present_series()
    return [problem for group in groups for problem in patches.check(group.for_series(series))]


def require_fit(run: Run) -> None:
    """Check all groups that a run selects, of every stage. Raises UserError for the first that does not fit."""
    _require_fit(selected(run))


def apply(stage: Stage, run: Run) -> None:
    """Apply what a run selects of one stage: all of it or, raising UserError, nothing."""
    groups = selected(run, stage)
    _require_fit(groups)
    series = patches.present_series()
    patches.apply([patch for group in groups for patch in group.for_series(series)])


def _require_fit(groups: Iterable[PatchGroup]) -> None:
    problems = check(groups)
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}; none of these patches was applied, see `megatron-vp patches`")
