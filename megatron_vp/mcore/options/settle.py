"""Turns parsed arguments into a `SettledJob`: chooses settings, writes them into Megatron's arguments, validates the
arguments, and refuses those that cannot work.

This module runs on every rank, before any process group exists.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_vp.cost.layers.job_plan import default_schedule
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.mcore.options.host_room import check_host_room, chosen_offload
from megatron_vp.mcore.options.predicted_job import Prediction, choose_order, fit_schedule
from megatron_vp.mcore.options.refusals import check_given, refuse, warnings_of
from megatron_vp.mcore.options.vocab_rows import choose_rows
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.installed import parts_of_job
from megatron_vp.mcore.settled import ChosenRows, RunSettings, SettledJob, process, run_settings
from megatron_vp.mcore.storage.checkpoint_check import check_checkpoint
from megatron_vp.mcore.storage.checkpoint_files import check_writable
from megatron_vp.mcore.storage.save_folder import saves_to
from megatron_vp.row_counts import check_stage_rows
from megatron_vp.schedule import DEFAULT_SCHEDULE

_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
"""The arguments that set the number of chunks per rank."""


def settled_from_flags(
    megatron: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any], files: bool = False
) -> SettledJob:
    """Validate parsed arguments with Megatron's `validate_args` and our own checks, and return the job. Writes our
    choices, such as the pipeline layout, into `args`.

    defaults: the script's defaults for Megatron's arguments.
    files: whether to run `check_files` too, which finds the checkpoint to load.
    """

    def validated(job: Arguments) -> Arguments:
        # Local layers do not use grouped GEMMs, so Megatron must not require a device that supports them.
        grouped = job.moe_grouped_gemm
        vars(args).update(vars(job) | {"moe_grouped_gemm": grouped and job.transformer_impl != "local"})
        megatron(args, defaults)
        args.moe_grouped_gemm = grouped
        return Arguments(vars(args))

    return settled_job(Arguments(vars(args)), validated, files).of(args)


def settled_job(
    given: Arguments, validated: Callable[[Arguments], Arguments] | None = None, files: bool = False
) -> SettledJob:
    """Choose what a job leaves open, and check the job. Raises UserError for a job that cannot work.

    validated: writes the choices into Megatron's arguments, and lets Megatron validate them; None if Megatron has
        validated the model's configuration and made the process groups already.
    files: whether to run `check_files` too, which finds the checkpoint to load.
    """
    # 1. Check what the user gave, before anything is derived from it.
    check_given(given)
    given |= {"offload_chunks": chosen_offload(given)}
    asked, given = given, _with_schedule(given)
    settings, prediction = run_settings(given), Prediction(given)
    _refuse_numbers_of_chunks(given, settings)

    # 2. Make our choices.
    shards = choose_rows(given, settings, prediction)
    if shards.whole:
        given = _with_schedule(asked | {"vocab_parallel": False})
        settings, prediction = run_settings(given), Prediction(given)
    args = given | _choices(given, settings, shards)
    order = choose_order(args, settings, prediction)
    if args.activation_limit is not None:
        settings = fit_schedule(args, settings, prediction, order)
        args |= {"schedule_shape": settings.family.shape}

    # 3. Let Megatron validate.
    if validated is not None:
        args = validated(args)

    # 4. Apply our refusals.
    refuse(args)
    if args.vocab_rows is not None and prediction.vocabulary is not None:  # Otherwise, the model's split checks rows.
        sizes = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
        check_stage_rows(args.vocab_rows, prediction.vocabulary, *sizes)
    check_host_room(args, settings, prediction)
    checkpoint = check_files(args) if files else None
    parts = parts_of_job(args, installed.installed(), settings.replaces_schedule and settings.splits_backward)
    warnings = warnings_of(args)
    return SettledJob(
        args, settings, given, shards, order, parts, process.words, installed.of_nodes, checkpoint, warnings
    )


def _with_schedule(args: Arguments) -> Arguments:
    """Arguments that name a schedule. 1f1b stands for Megatron's own schedule, with any number of chunks."""
    if args.pipeline_schedule is not None:
        return args
    ours = args.vocab_parallel or args.offload_chunks != "0"
    return args | {"pipeline_schedule": default_schedule(vars(args)).name if ours else DEFAULT_SCHEDULE}


def _choices(given: Arguments, settings: RunSettings, shards: ChosenRows) -> dict[str, Any]:
    """Our choices, by argument. Megatron builds its stages from these arguments, and saves them in checkpoints."""
    from megatron_vp.mcore.model.chunk_layout import even_layout

    chosen: dict[str, Any] = {}
    chosen["vocab_rows"] = shards.rows
    layout, pattern, chunks = shards.layout, pattern_in(vars(given)), settings.family.chunks or 1
    stages = chunks * given.pipeline_model_parallel_size
    if layout is None and chunks > 1:  # Divide the layers evenly among the chunks, unless the user has.
        if pattern is not None and pattern.layers is None:
            layout = pattern.with_bars(even_layers(len(pattern.letters), stages))
        elif pattern is None and given.pipeline_model_parallel_layout is None and given.num_layers is not None:
            layout = even_layout(given.num_layers, stages, given.mtp_num_layers or 0)
    if layout is not None and pattern is None:
        chosen |= dict.fromkeys(_CHUNKS) | {"pipeline_model_parallel_layout": layout}
    elif layout is not None:
        chosen |= {"hybrid_layer_pattern": layout, "hybrid_override_pattern": None}
    if settings.replaces_schedule:
        # Our schedules would never compute the weight gradients that this option defers.
        chosen["defer_embedding_wgrad_compute"] = False
        if settings.places_chunks:
            chosen["chunk_placement"] = settings.family.placement_of(given.pipeline_model_parallel_size).stage_of
    if settings.digest is not None:
        chosen["schedule_fingerprint"] = f"sha256:{settings.digest}"
    return chosen


_FOLDERS = ("save", "tensorboard_dir", "rank_report", "pipeline_trace")


def check_files(args: Arguments) -> str | None:
    """Check the checkpoint and the output folders that validated arguments name. Creates nothing.

    Returns the directory of the checkpoint to load, as `check_checkpoint` does. Raises UserError if any file or folder
    cannot be used.
    """
    checkpoint = check_checkpoint(args)
    written = [("--" + name.replace("_", "-"), getattr(args, name)) for name in _FOLDERS]
    for option, folder in [*written, saves_to(args) or ("", None)]:
        if folder is not None and "://" not in folder:
            check_writable(option, folder)
    return checkpoint


def _refuse_numbers_of_chunks(args: Arguments, settings: RunSettings) -> None:
    """Raise UserError if an option sets the number of chunks per rank although the schedule already fixes it."""
    chunks = settings.family.chunks or 1
    if chunks > 1 and any(getattr(args, name) is not None for name in _CHUNKS):
        raise UserError(
            f"--pipeline-schedule {args.pipeline_schedule} already sets {'two' if chunks == 2 else chunks} chunks "
            f"per rank: leave out {' and '.join(map(option_of, _CHUNKS))}"
        )
