"""Prints a job's banner once at startup, so that the log shows which parts of the plug-in are active."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from contextlib import suppress

import torch

from megatron_vp import __version__
from megatron_vp.cost.planning.candidates import Candidate, method_of
from megatron_vp.cost.planning.evaluation import evaluation_of
from megatron_vp.cost.planning.predict import make_simulator, predict
from megatron_vp.cost.planning.samples import sampled
from megatron_vp.cost.planning.stage_costs import layers_of
from megatron_vp.errors import UserError
from megatron_vp.jobs.division import last_batch
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.options.vocab_rows import describe_rows
from megatron_vp.mcore.platform.parts import describe
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.schedule.gc_paused import gc_paused

_GIB = 2**30

_NO_BATCH = "bubble and memory are not predicted: pass global_batch_size and micro_batch_size to megatron_vp.enable"


def print_banner(job: SettledJob, knows_batch: bool = True) -> None:
    """Print the banner of this process's job. Call this function on one rank only.

    knows_batch: whether the job's arguments contain its real batch sizes; otherwise there are no predictions.
    """
    described = describe_run(job, job.arguments.world_size, knows_batch)
    predicted = describe_prediction(job) if knows_batch else [_NO_BATCH]
    lines = [", ".join(versions()), *described, *predicted]
    print(*(f"megatron_vp: {line}" for line in lines), sep="\n", flush=True)


def versions() -> list[str]:
    """The versions of this package, Megatron, Transformer Engine and PyTorch."""
    found = [f"megatron_vp {__version__}"]
    for title, package in (("megatron-core", "megatron-core"), ("Transformer Engine", "transformer-engine")):
        try:
            found.append(f"{title} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {title}")
    return [*found, f"torch {torch.__version__}"]


def describe_sizes(job: SettledJob, ranks: int, knows_batch: bool = True) -> str:
    """One line that says how a job divides its `ranks` ranks, and names its schedule and its vocabulary method."""
    args = job.arguments
    split = f"{args.pipeline_model_parallel_size} pipeline x {args.data_parallel_size} data"
    split += f" x {args.tensor_model_parallel_size} tensor" if args.tensor_model_parallel_size > 1 else ""
    growing = args.step_batch_size_schedule
    batch = args.global_batch_size if growing is None else last_batch(growing)
    microbatches = batch // args.micro_batch_size // args.data_parallel_size
    split += f"; {microbatches} microbatch{'es' * (microbatches != 1)}" if knows_batch else ""
    split += " at the end of --step-batch-size-schedule" if growing is not None else ""
    method = args.vocab_parallel_algorithm if args.vocab_parallel else "Megatron's own vocabulary layers"
    schedule = args.pipeline_schedule if job.settings.replaces_schedule else "Megatron's own schedule"
    return f"{ranks} ranks = {split}; {schedule}, {method}"


def describe_run(job: SettledJob, ranks: int, knows_batch: bool = True) -> list[str]:
    """Lines that describe a job on `ranks` ranks, such as its sizes, schedule, vocabulary method and precision."""
    args, digest = job.arguments, job.settings.digest
    lines = (
        describe_sizes(job, ranks, knows_batch),
        digest and f"--pipeline-schedule {args.pipeline_schedule}, as read at startup (sha256 {digest})",
        *_partition(job),
        describe(job.parts),
        _describe_precision(args) if job.settings.replaces_schedule else None,
        f"flags added for this machine: {' '.join(job.words.platform_flags)}" if job.words.platform_flags else None,
        *(f"warning: {each}" for each in job.warnings),
    )
    return [line for line in lines if line]


def _describe_precision(a: Arguments) -> str | None:
    """Describe which parts of an accepted job compute in fp8 or fp4, and how this was tested; None if no part does.

    All layers except the vocabulary layers may. docs/evidence/on_gpu.md says how each recipe was tested.
    """
    if not (a.fp8 or a.fp4):
        return None
    vocabulary = "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32"
    layers = "the other layers and their weights" if a.fp8_param_gather or a.fp4_param_gather else "the other layers"
    kind, recipe = ("fp4", a.fp4_recipe) if a.fp4 else ("fp8", a.fp8_recipe)
    # In fp4, gradients are rounded with random numbers, which depend on the order of passes.
    differ = "; losses differ between schedules, because gradients are rounded stochastically" if a.fp4 else ""
    return (
        f"{vocabulary} in the vocabulary layers, {kind} ({recipe}) in {layers}: tested only on CPU, without the {kind} "
        f"kernels{differ}"
    )


def describe_prediction(job: SettledJob) -> list[str]:
    """A list with one line: the predicted bubble and memory, or the reason why they cannot be predicted. Without
    pipeline parallelism, the list is empty.
    """
    if job.arguments.pipeline_model_parallel_size < 2:
        return []
    try:
        whole, plan, hardware = Prediction(job.given).planned(job.arguments, job.settings)
        with gc_paused():
            simulator = make_simulator(sampled(whole), plan, hardware)
            prediction = predict(sampled(whole), plan, hardware, simulator=simulator)
            found = evaluation_of(Candidate(method_of(plan), plan), prediction, simulator, whole)
    except UserError as error:
        return [f"bubble and memory cannot be predicted: {error}"]
    fullest = max(range(whole.pipeline), key=lambda rank: found.memory[rank].total)
    return [
        f"predicted for {hardware.title}: bubble {100 * found.bubble_fraction:.1f} %, peak memory "
        f"{found.memory[fullest].total / _GIB:.3g} GiB (on pipeline rank {fullest})"
    ]


def _partition(job: SettledJob) -> list[str]:
    """Lines that list the vocabulary rows of each pipeline rank and the layers of each stage, if these are known. The
    last line may warn of ranks without layers.
    """
    rows, layers, left_out = (
        describe_rows(job),
        layers_given(job.arguments),
        ", ".join(Prediction(job.given, job.words).uncounted),
    )
    with suppress(UserError):  # The cost model does not cover every job.
        sizes, plan, _ = Prediction(job.given).planned(job.arguments, job.settings)
        layers = layers or layers_of(sizes, plan, job.placement)
        if rows is None and (counts := plan.rows_by_rank(sizes)):
            rows = f"vocabulary rows by pipeline rank: {_numbers(counts)}"
    lines = (
        rows,
        layers and f"layers by stage: {_numbers(layers)}",
        left_out and f"options that predictions and balanced rows do not count: {left_out}",
        layers and _warn_of_empty_ranks(job, layers),
    )
    return [line for line in lines if line]


def _warn_of_empty_ranks(job: SettledJob, layers: Sequence[int]) -> str | None:
    """Return a warning if some pipeline ranks have no layers because there are fewer layers than stages. Otherwise, or
    if the user gave the layout, return None.
    """
    given, stages = vars(job.given), job.placement.stage_of
    pattern = pattern_in(given)
    laid_out = given["pipeline_model_parallel_layout"] if pattern is None else pattern.layers
    empty = sum(not any(layers[stage] for stage in own) for own in stages)
    if not empty or sum(layers) >= len(layers) or laid_out:
        return None
    return (
        f"warning: {empty} of {len(stages)} pipeline ranks have no transformer layer and are idle most of the time: "
        f"use --pipeline-model-parallel-size {min(sum(layers), len(stages) - 1)} or less"
    )


def _numbers(values: Sequence[int]) -> str:
    """Format one number for each rank or stage; a long list of equal numbers becomes `N each`."""
    if len(values) > 8 and len(set(values)) == 1:
        return f"{values[0]} each"
    return ",".join(map(str, values))
