"""Turns parsed arguments into a `SettledJob`: chooses settings, writes them into Megatron's arguments, validates the
arguments, and refuses those that cannot work.

This module runs on every rank, before any process group exists.
"""

from __future__ import annotations

import argparse
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_vp.cost.sizes.job_plan import default_schedule
from megatron_vp.errors import Reasons, UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.mcore.megatron_lock import check_arguments
from megatron_vp.mcore.options.host_room import check_host_room, chosen_offload
from megatron_vp.mcore.options.predicted_job import Prediction, choose_order, fit_schedule
from megatron_vp.mcore.options.refusals import check_numbers, check_sizes, refuse, warnings_of
from megatron_vp.mcore.options.vocab_rows import check_rows, choose_rows
from megatron_vp.mcore.platform import installed
from megatron_vp.mcore.platform.parts import parts_of_job
from megatron_vp.mcore.reports.trace_option import check_trace_iterations
from megatron_vp.mcore.settled import ChosenRows, RunSettings, SettledJob, run_settings, words
from megatron_vp.mcore.storage.checkpoint_check import check_checkpoint
from megatron_vp.mcore.storage.checkpoint_files import check_writable
from megatron_vp.mcore.storage.dataset import check_inputs
from megatron_vp.mcore.storage.save_folder import saves_to
from megatron_vp.schedule import DEFAULT_SCHEDULE


def settled_job(
    megatron: Callable[..., Any] | None, args: argparse.Namespace, defaults: dict[str, Any], files: bool = False
) -> SettledJob:
    """Validate parsed arguments with Megatron's own function and our own checks, and return the resulting job.

    Args:
        megatron: Megatron's `validate_args`; None if Megatron has validated the model's configuration and made the
            process groups already.
        args: parsed arguments. The function writes our choices into them, such as the pipeline layout and the number
            of vocabulary rows per rank.
        defaults: the script's defaults for Megatron's arguments.
        files: whether to run `check_files` too, which finds the checkpoint to load.

    Raises:
        UserError: for arguments that cannot work; the message lists every reason found.
    """
    # 1. Check the user's own arguments, before anything is derived from them.
    check_numbers(args)
    args.offload_chunks = chosen_offload(args)
    if args.pipeline_schedule is None:  # 1f1b stands for Megatron's own schedule, with any number of chunks.
        ours = args.vocab_parallel or args.offload_chunks != "0"
        args.pipeline_schedule = default_schedule(vars(args)).name if ours else DEFAULT_SCHEDULE
    settings, given = run_settings(args), argparse.Namespace(**vars(args))
    prediction = Prediction(given)
    _refuse_numbers_of_chunks(args, settings)

    # 2. Make our choices.
    reasons, shards, checkpoint = Reasons(), ChosenRows(), None
    with reasons.collected():
        shards = choose_rows(args, settings, prediction)
    _write_choices(args, settings, shards)
    order = choose_order(args, settings, prediction)
    settings = fit_schedule(args, settings, prediction, order)

    # 3. Check the sizes that Megatron would refuse without naming the options, then let Megatron validate.
    validated = False
    with reasons.collected():
        check_sizes(args)
        if megatron is not None:
            _validate(megatron, args, defaults)
        validated = True
    if not validated:  # The code below needs the arguments that Megatron derives.
        reasons.refuse()

    # 4. Apply our refusals.
    checks: tuple[Callable[[argparse.Namespace], None], ...] = (
        refuse,
        partial(check_rows, prediction=prediction),
        partial(check_host_room, settings=settings, prediction=prediction),
        check_trace_iterations,
    )
    for check in checks:
        with reasons.collected():
            check(args)
    if files:
        with reasons.collected():
            checkpoint = check_files(args)
    reasons.refuse()
    parts = parts_of_job(args, installed.installed(), settings.replaces_schedule and settings.splits_backward)
    warnings = warnings_of(args)
    return SettledJob(args, settings, given, shards, order, parts, words(), installed.of_nodes, checkpoint, warnings)


def _write_choices(args: argparse.Namespace, settings: RunSettings, shards: ChosenRows) -> None:
    """Write our choices into `args`. Megatron builds its stages from `args`, and saves `args` in checkpoints."""
    args.vocab_rows = shards.rows
    if shards.layout is not None and pattern_in(vars(args)) is None:
        args.pipeline_model_parallel_layout = shards.layout
        args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    elif shards.layout is not None:
        args.hybrid_layer_pattern, args.hybrid_override_pattern = shards.layout, None
    if (settings.family.chunks or 1) > 1:
        _lay_out_chunks(args, settings.family.chunks)
    if settings.replaces_schedule and settings.places_chunks:
        args.chunk_placement = settings.family.placement_of(args.pipeline_model_parallel_size).stage_of
    if settings.replaces_schedule:
        # Our schedules would never compute the weight gradients that this option defers.
        args.defer_embedding_wgrad_compute = False
    if settings.digest is not None:
        args.schedule_fingerprint = f"sha256:{settings.digest}"


def _validate(megatron: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    # Local layers do not use grouped GEMMs, so Megatron must not require a device that supports them.
    grouped = args.moe_grouped_gemm
    args.moe_grouped_gemm = grouped and args.transformer_impl != "local"
    with refused_by_megatron():
        megatron(args, defaults)
    check_arguments(args, "derived")
    args.moe_grouped_gemm = grouped


_FOLDERS = ("save", "tensorboard_dir", "rank_report", "pipeline_trace")


def check_files(args: argparse.Namespace) -> str | None:
    """Check the data, the tokenizer, the checkpoint and the output folders that validated arguments name. Creates
    nothing.

    Returns the directory of the checkpoint to load, as `check_checkpoint` does. Raises UserError if any file or folder
    cannot be used.
    """
    reasons, checkpoint = Reasons(), None
    with reasons.collected():
        check_inputs(args)
    with reasons.collected():
        checkpoint = check_checkpoint(args)
    written = [("--" + name.replace("_", "-"), getattr(args, name)) for name in _FOLDERS]
    for option, folder in [*written, saves_to(args) or ("", None)]:
        if folder is not None and "://" not in folder:
            with reasons.collected():
                check_writable(option, folder)
    reasons.refuse()
    return checkpoint


@contextmanager
def refused_by_megatron() -> Iterator[None]:
    """If Megatron rejects arguments with a failed assertion or another error, raise UserError instead."""
    try:
        yield
    except UserError:
        raise
    except (AssertionError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        # Some of Megatron's assertions have no message, or divide by zero: show the condition instead.
        said = "" if isinstance(error, ZeroDivisionError) else " ".join(str(error).split())
        said = said or f"it requires {_condition(error)}"
        raise UserError(f"Megatron refuses these arguments: {said}") from error


def _condition(error: Exception) -> str:
    """The condition of the assertion that failed, with each `args.name` replaced by its command-line option."""
    condition = (traceback.extract_tb(error.__traceback__)[-1].line or "").removeprefix("assert ").rstrip(" ,\\")
    condition = re.sub(r"\bargs\.(\w+)", lambda name: option_of(name[1]), condition)
    condition = re.sub(r"(--[\w-]+) is not None", r"\1", condition)
    return re.sub(r"(--[\w-]+) is None", r"not \1", condition)


def _refuse_numbers_of_chunks(args: argparse.Namespace, settings: RunSettings) -> None:
    """Raise UserError if an option sets the number of chunks per rank although the schedule already fixes it."""
    chosen = (args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank)
    chunks = settings.family.chunks or 1
    if chunks > 1 and any(value is not None for value in chosen):
        raise UserError(
            f"--pipeline-schedule {args.pipeline_schedule} already sets {'two' if chunks == 2 else chunks} chunks "
            f"per rank: leave out --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
        )


def _lay_out_chunks(args: argparse.Namespace, chunks: int) -> None:
    """Divide the layers evenly among the schedule's chunks, unless the user has given a layout."""
    from megatron_vp.mcore.model.chunk_layout import even_layout

    pattern, stages = pattern_in(vars(args)), chunks * args.pipeline_model_parallel_size
    if pattern is not None:
        if pattern.layers is None:
            args.hybrid_layer_pattern = pattern.with_bars(even_layers(len(pattern.letters), stages))
            args.hybrid_override_pattern = None
    elif args.pipeline_model_parallel_layout is None and args.num_layers is not None:
        args.pipeline_model_parallel_layout = even_layout(args.num_layers, stages, args.mtp_num_layers or 0)
