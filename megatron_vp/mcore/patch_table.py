"""Lists every group of patches for Megatron, the runs that need the group, and when the group is applied.

A group names the module of its patches as a string, so that importing this table does not import Megatron. Only the
modules of groups that a run needs are imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore import patches
from megatron_vp.mcore.patches import Patch, Problem
from megatron_vp.mcore.platform.flags import uses_cpu
from megatron_vp.mcore.platform.installed import installed
from megatron_vp.mcore.settled import own_loop, replay, run_settings


class Stage(Enum):
    """The point in startup at which a patch group is applied, after all groups that the run needs have been checked."""

    BEFORE_PARSING = "before Megatron parses the arguments"
    AFTER_VALIDATION = "after Megatron has validated the arguments"


@dataclass(frozen=True)
class Condition:
    """Condition under which a run needs a group of patches: a description for users, and a function that tests it.

    The function gets Megatron's parsed arguments or, until they are parsed, those of `options.early_arguments`.
    """

    sentence: str
    holds: Callable[[Arguments], object]


@dataclass(frozen=True)
class PatchGroup:
    """Patches that are applied together.

    patches: `module:attribute` of a tuple of patches.
    without: what happens in a run without the patches.
    essential: whether a run that needs the patches is refused if they do not fit Megatron. True if the run could
        otherwise compute wrong results, hang, or damage checkpoints. False if the run would only lose a convenience or
        stop with an error from Megatron; the log then says that the patches are left out.
    package: the package that owns the patched symbols; None for Megatron. If the package is not installed, the patches
        are neither checked nor applied.
    """

    name: str
    patches: str
    applies: Condition
    without: str
    essential: bool = True
    stage: Stage = Stage.AFTER_VALIDATION
    package: str | None = None

    def declared(self) -> tuple[Patch, ...]:
        """Import the module of the patches, and with it parts of Megatron. Return those that this Megatron needs."""
        module, _, attribute = self.patches.partition(":")
        every: tuple[Patch, ...] = getattr(importlib.import_module(module), attribute)
        series = patches.present_series()
        return tuple(patch for patch in every if series not in patch.unneeded_in)


def _given(*names: str) -> Condition:
    """The run gives one of these options."""
    options = " or ".join(map(option_of, names))
    return Condition(f"only with {options}", lambda args: any(getattr(args, name) for name in names))


ALWAYS = Condition("always", lambda args: True)
NO_ENGINE = Condition("only if Transformer Engine is not installed", lambda args: not installed().engine)
EARLY = Stage.BEFORE_PARSING


def _records(args: Arguments) -> object:
    logs = str(args.log_pipeline_interval) not in ("0", "None")
    return logs or args.rank_report is not None or args.pipeline_trace is not None


def _with_bridges_models(_args: Arguments) -> bool:
    return own_loop() is not None and "megatron.bridge.models.model_provider" in sys.modules


def _in_own_loop(args: Arguments) -> bool:
    loop = own_loop()
    return loop is not None and not loop.reads_arguments() and run_settings(args).replaces_schedule


# Groups with the same `Stage` are applied in this order.
GROUPS = (
    PatchGroup(
        "wheel",
        "megatron_vp.mcore.platform.missing_packages:INDEX_PATCHES",
        ALWAYS,
        "Megatron compiles its index helpers at every start, and ends the job if the compilation fails",
        essential=False,
        stage=EARLY,
    ),
    PatchGroup(
        "torch norms",
        "megatron_vp.mcore.platform.missing_packages:NORM_PATCHES",
        ALWAYS,
        "Megatron refuses jobs that combine local layers with --sequence-parallel",
        essential=False,
        stage=EARLY,
    ),
    PatchGroup(
        "arguments",
        "megatron_vp.mcore.options.arguments:PATCHES",
        ALWAYS,
        "Megatron would reject our options and accept combinations of arguments that cannot work",
        stage=EARLY,
    ),
    PatchGroup(
        "checkpoint files",
        "megatron_vp.mcore.storage.checkpoint_files:PATCHES",
        ALWAYS,
        "checkpoints could hold wrong optimizer state, and two runs could overwrite each other's checkpoints",
        stage=EARLY,
    ),
    PatchGroup(
        "same job",
        "megatron_vp.mcore.start.same_job:PATCHES",
        ALWAYS,
        "ranks with different settings would hang the job or silently train a wrong model",
        stage=EARLY,
    ),
    PatchGroup(
        "no transformer engine",
        "megatron_vp.mcore.platform.missing_packages:PATCHES",
        NO_ENGINE,
        "Adam would keep a single step count for all parameters, and checkpoints would not load",
        stage=EARLY,
    ),
    PatchGroup(
        "warm-up",
        "megatron_vp.mcore.platform.missing_packages:WARM_UP_PATCHES",
        NO_ENGINE,
        "a job on GPUs takes minutes longer to start, because Megatron compiles kernels that no layer uses",
        essential=False,
        stage=EARLY,
    ),
    PatchGroup(
        "no fused accumulation",
        "megatron_vp.mcore.platform.missing_packages:APEX_PATCHES",
        Condition(
            "only if Apex's fused_weight_gradient_mlp_cuda is not installed",
            lambda args: not installed().apex_accumulation,
        ),
        "Megatron refuses jobs that use gradient accumulation fusion, which is enabled by default on a GPU",
        essential=False,
        stage=EARLY,
    ),
    PatchGroup(
        "cpu platform",
        "megatron_vp.mcore.platform.cpu:PATCHES",
        Condition("only if the run uses no CUDA device", lambda args: uses_cpu([])),
        "a run on CPU would fail or compute inaccurate gradient norms",
        stage=EARLY,
    ),
    PatchGroup(
        "replay",
        "megatron_vp.mcore.replay.one_rank:PATCHES",
        _given("fake_process_group"),
        "the replayed rank would compute with uninitialized memory and wait for ranks that do not exist",
        stage=EARLY,
    ),
    PatchGroup(
        "shapes only",
        "megatron_vp.mcore.replay.shapes_only:PATCHES",
        Condition("only in a replay with --shapes-only", lambda args: replay().meter),
        "a replay would read the states of random generators from tensors that have no contents",
        stage=EARLY,
    ),
    PatchGroup(
        "shapes of Transformer Engine",
        "megatron_vp.mcore.replay.device_kernels:ENGINE_PATCHES",
        Condition(
            "only in a replay with --shapes-only, if the job uses Transformer Engine's layers",
            lambda args: replay().counts_engine,
        ),
        "a replay would count memory that Megatron's compiled activation functions do not use on a GPU",
        stage=EARLY,
    ),
    PatchGroup(
        "parameter groups",
        "megatron_vp.mcore.storage.parameter_groups:PATCHES",
        _given("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        "Megatron refuses a job whose learning rates differ from those in the checkpoint that it loads",
        essential=False,
    ),
    PatchGroup(
        "chunk data",
        "megatron_vp.mcore.training.chunk_data:PATCHES",
        _given("iterations_to_skip", "multiple_validation_sets"),
        "on ranks with several chunks, skipping iterations would crash and evaluations would use the wrong data",
    ),
    PatchGroup(
        "heterogeneous layers",
        "megatron_vp.mcore.model.heterogeneous:PATCHES",
        _given("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
        "ranks with several chunks could build the wrong layers",
    ),
    PatchGroup(
        "flash attention",
        "megatron_vp.mcore.model.attention:PATCHES",
        Condition("only with --core-attention sdpa", lambda args: args.core_attention == "sdpa"),
        "a run would use a different attention implementation from the one requested",
    ),
    PatchGroup(
        "vocabulary parallelism",
        "megatron_vp.mcore.training.vocab_patches:PATCHES",
        _given("vocab_parallel"),
        "Megatron would synchronize shards of the word embedding as if they were copies, and multi-token prediction "
        "would fail",
    ),
    PatchGroup(
        "pipeline schedule",
        "megatron_vp.mcore.training.vocab_patches:SCHEDULE_PATCHES",
        Condition(
            "only with --vocab-parallel or a --pipeline-schedule other than 1f1b",
            lambda args: run_settings(args).replaces_schedule,
        ),
        "a run would use Megatron's own schedule and vocabulary layers",
    ),
    PatchGroup(
        "models of custom scripts",
        "megatron_vp.mcore.model.preparation:PATCHES",
        Condition("only after `megatron_vp.enable`", lambda args: own_loop() is not None),
        "the vocabulary layers of models built without Megatron's builders would not be split, so our schedules would "
        "refuse these models",
    ),
    PatchGroup(
        "models of Megatron-Bridge",
        "megatron_vp.mcore.model.preparation:BRIDGE_PATCHES",
        Condition(
            "only after `megatron_vp.enable`, in a process that has imported Megatron-Bridge's models",
            _with_bridges_models,
        ),
        "the vocabulary layers of Megatron-Bridge's models would not be split, so our schedules would refuse these "
        "models",
        package="megatron.bridge",
    ),
    PatchGroup(
        "exports of Megatron-Bridge",
        "megatron_vp.mcore.model.whole_vocabulary:BRIDGE_PATCHES",
        Condition(
            "only after `megatron_vp.enable` with vocab_parallel, in a process that has imported Megatron-Bridge's "
            "models",
            lambda args: _with_bridges_models(args) and args.vocab_parallel,
        ),
        "Megatron-Bridge's export would find shards instead of whole vocabulary layers",
        package="megatron.bridge",
    ),
    PatchGroup(
        "optimizer state of custom loops",
        "megatron_vp.mcore.storage.optimizer_form:PATCHES",
        Condition(
            "only after `megatron_vp.enable`, in a process that uses one of our schedules and does not let Megatron "
            "parse arguments",
            _in_own_loop,
        ),
        "a run with a different parallel layout would silently load optimizer moments that belong to other parameters",
    ),
    PatchGroup(
        "optimizer state of Megatron-Bridge",
        "megatron_vp.mcore.storage.optimizer_form:BRIDGE_PATCHES",
        Condition(
            "only after `megatron_vp.enable`, in a process that uses one of our schedules and has imported "
            "Megatron-Bridge's training loop",
            lambda args: _in_own_loop(args) and "megatron.bridge.training.checkpointing" in sys.modules,
        ),
        "a run would refuse to save checkpoints in Megatron-Bridge's default format",
        package="megatron.bridge",
    ),
    PatchGroup(
        "split backward",
        "megatron_vp.mcore.model.split_backward:PATCHES",
        Condition("only with a --pipeline-schedule that has W passes", lambda args: run_settings(args).splits_backward),
        "backward passes would not be split, and W passes would do nothing",
    ),
    PatchGroup(
        "delayed weight gradients",
        "megatron_vp.mcore.model.delayed_weights:PATCHES",
        Condition(
            "only with Transformer Engine's layers and a --pipeline-schedule that has W passes",
            lambda args: (
                run_settings(args).splits_backward
                and args.transformer_impl in (None, "transformer_engine")
                and installed().engine
            ),
        ),
        "backward passes would not be split, and W passes would do nothing",
    ),
    PatchGroup(
        "chunk placement",
        "megatron_vp.mcore.model.chunk_layout:PATCHES",
        Condition(
            "only with a --pipeline-schedule that places chunks differently from Megatron",
            lambda args: run_settings(args).places_chunks,
        ),
        "layers would run in the wrong order",
    ),
    PatchGroup(
        "plain schedule",
        "megatron_vp.mcore.reports.plain_schedule:PATCHES",
        Condition(
            "only if Megatron's own schedule is recorded (--rank-report, --pipeline-trace or --log-pipeline-interval)",
            lambda args: _records(args) and not run_settings(args).replaces_schedule,
        ),
        "Megatron's passes are not recorded",
        essential=False,
    ),
    PatchGroup(
        "training log",
        "megatron_vp.mcore.reports.pipeline_scalars:PATCHES",
        Condition("except after `megatron_vp.enable`", lambda args: own_loop() is None),
        "after a start, the log's second loss is the mean of two iterations, and pipeline metrics are not written",
        essential=False,
    ),
)


def patches_of(name: str) -> tuple[Patch, ...]:
    """The patches of the group called `name`, for the installed Megatron."""
    return next(group for group in GROUPS if group.name == name).declared()


def selected(args: Arguments, stage: Stage | None = None) -> tuple[PatchGroup, ...]:
    """The groups that a run needs at `stage` or, by default, at all stages, in the order of the table."""
    return tuple(group for group in GROUPS if stage in (None, group.stage) and group.applies.holds(args))


def examine(group: PatchGroup) -> tuple[tuple[Patch, ...], list[Problem]]:
    """Return a group's patches for the installed Megatron, and every reason why they cannot be applied."""
    if group.package is not None:
        try:
            importlib.import_module(group.package)
        except ImportError:
            return (), []
    try:
        declared = group.declared()
    except ImportError as error:
        return (), [
            Problem(
                f"the patch group '{group.name}'",
                f"what {group.patches.partition(':')[0]} imports",
                f"nothing ({error})",
            )
        ]
    return declared, patches.check(declared)


def needs(places: Iterable[str]) -> bool:
    """Whether one of these places in our sources (`megatron_vp/mcore/x.py:7`) belongs to more than optional groups."""
    modules = {place.partition(".py:")[0].replace("/", ".") for place in places}
    essential = {group.patches.partition(":")[0] for group in GROUPS if group.essential}
    return bool(modules - ({group.patches.partition(":")[0] for group in GROUPS} - essential))


def require_fit(args: Arguments) -> None:
    """Check every patch group that a run needs, for all stages of startup. Raises UserError if an essential group does
    not fit the installed packages.
    """
    _fitting(selected(args))


def apply(stage: Stage, args: Arguments) -> None:
    """Apply the patches that a run needs at a stage of startup. If an essential patch does not fit, apply none and
    raise UserError.

    If a group of patches is not essential and does not fit, it is left out, and the rank that writes the log prints
    why.
    """
    declared, left_out = _fitting(selected(args, stage))
    if left_out and (args.fake_process_group or args.rank == args.world_size - 1):
        print(*(f"megatron_vp: {line}" for line in left_out), sep="\n", flush=True)
    patches.apply(declared)


def apply_early(args: Arguments, *names: str) -> None:
    """Apply the patch groups in `names` that the run needs, earlier in startup than `apply` would. Raises UserError if
    a patch does not fit the installed packages.
    """
    patches.apply([patch for group in selected(args) if group.name in names for patch in patches_of(group.name)])


def _fitting(groups: Iterable[PatchGroup]) -> tuple[list[Patch], list[str]]:
    """Return the patches that fit, and a line for each group that does not fit. Raises UserError if an essential group
    does not fit.
    """
    fitting: list[Patch] = []
    left_out: list[str] = []
    problems: list[Problem] = []
    for group in groups:
        declared, found = examine(group)
        if not found:
            fitting += declared
        elif group.essential:
            problems += found
        else:
            left_out.append(f"patch group '{group.name}' is left out: {found[0]}; without it, {group.without}")
    patches.refuse(problems)
    return fitting, left_out
