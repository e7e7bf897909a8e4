"""Prints a job's banner once at startup, so that the log shows which parts of the plug-in are active."""

from __future__ import annotations

from megatron_vp.jobs.job_config import last_batch
from megatron_vp.mcore.options.predicted_job import Prediction
from megatron_vp.mcore.platform.installed import describe, versions
from megatron_vp.mcore.reports.job_partition import layers_given
from megatron_vp.mcore.settled import SettledJob


def print_banner(job: SettledJob, knows_batch: bool = True) -> None:
    """Print the banner of this process's job. Call this function on one rank only.

    knows_batch: whether the job's arguments contain its real batch sizes.
    """
    software = ", ".join(f"{package} {found}" if found else f"no {package}" for package, found in versions().items())
    lines = [software, *describe_run(job, job.arguments.world_size, knows_batch)]
    print(*(f"megatron_vp: {line}" for line in lines), sep="\n", flush=True)


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
    args, shards, layers = job.arguments, job.shards, layers_given(job.arguments)
    rows = "equal" if shards.rows is None else ",".join(map(str, shards.rows))
    left_out = ", ".join(Prediction(job.given, job.words).uncounted)
    lines = (
        describe_sizes(job, ranks, knows_batch),
        shards.reason if shards.whole else None,
        args.vocab_parallel
        and f"vocabulary rows by pipeline rank: {rows} ({shards.reason or f'--vocab-shards {args.vocab_shards}'})",
        layers and f"layers by stage: {','.join(map(str, layers))}",
        left_out and f"options that predictions and balanced rows do not count: {left_out}",
        describe(job.parts),
        f"flags added for this machine: {' '.join(job.words.platform_flags)}" if job.words.platform_flags else None,
        *(f"warning: {each}" for each in job.warnings),
    )
    return [line for line in lines if line]
