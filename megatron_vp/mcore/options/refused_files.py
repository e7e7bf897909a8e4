"""Refusals of schedule files that cannot be run, and of jobs that do not match their schedule file."""

from __future__ import annotations

import argparse

from megatron_vp.mcore.options.refusal import Refusal
from megatron_vp.mcore.settled import run_settings
from megatron_vp.schedule import PassKind, Placement, Schedule, VocabMethod


def _fixed(a: argparse.Namespace) -> Schedule | None:
    """The schedule in the file that --pipeline-schedule names; None if the option names a family."""
    return run_settings(a).family.fixed


def _holders(a: argparse.Namespace) -> tuple[int, ...]:
    """The pipeline ranks with vocabulary rows."""
    rows = a.vocab_rows
    return tuple(rank for rank in range(a.pipeline_model_parallel_size) if rows is None or any(rows[rank : rank + 1]))


def _microbatches(a: argparse.Namespace) -> int:
    return a.global_batch_size // (a.micro_batch_size * a.data_parallel_size)


def _starts_late(schedule: Schedule) -> bool:
    """Whether, in some chunk, the first weight gradient to be computed belongs to a microbatch other than 0."""
    gives = {PassKind.W} if schedule.split_backward else {PassKind.B}
    for order in schedule.ranks:
        seen: set[int] = set()
        for step in order:
            if step.kind in gives | {PassKind.BW} and step.chunk not in seen:
                seen.add(step.chunk)
                if step.microbatch:
                    return True
    return False


FILE_REFUSALS = (
    Refusal(
        lambda a: (file := _fixed(a)) and a.vocab_parallel and file.vocab is VocabMethod.NONE,
        "--pipeline-schedule {pipeline_schedule} has no vocabulary passes: leave --vocab-parallel out, or write a "
        "schedule file with vocabulary passes (megatron-vp schedule NAME --vocab vocab-2 --format json)",
    ),
    Refusal(
        lambda a: _fixed(a) and a.offload_chunks != "0",
        "--pipeline-schedule {pipeline_schedule} with --offload-chunks {offload_chunks} is not supported: the schedule "
        "file decides which chunks are offloaded; leave --offload-chunks out, or write a schedule file that offloads "
        "them (megatron-vp schedule NAME --offload-chunks {offload_chunks} --format json)",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and file.vocab.is_sharded and file.vocab != a.vocab_parallel_algorithm,
        "--pipeline-schedule {pipeline_schedule} has the vocabulary passes of {file_method}, but "
        "--vocab-parallel-algorithm is {vocab_parallel_algorithm}: use --vocab-parallel-algorithm {file_method}",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and file.pipeline_size != a.pipeline_model_parallel_size,
        "--pipeline-schedule {pipeline_schedule} has {file_ranks} ranks, but --pipeline-model-parallel-size is "
        "{pipeline_model_parallel_size}: use --pipeline-model-parallel-size {file_ranks}",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and file.vocab.is_sharded and file.vocab_ranks != _holders(a),
        "--pipeline-schedule {pipeline_schedule} has vocabulary passes on ranks {file_holders}, but vocabulary rows "
        "are on ranks {row_holders}: use --vocab-shards with rows on ranks {file_holders} only",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and not a.skip_train and not file.kinds & {PassKind.B, PassKind.BW},
        "--pipeline-schedule {pipeline_schedule} has no backward passes, so it cannot train: use a schedule file with "
        "backward passes, or add --skip-train to evaluate only",
    ),
    Refusal(
        lambda a: _fixed(a) and a.step_batch_size_schedule,
        "--pipeline-schedule {pipeline_schedule} with --step-batch-size-schedule is not supported: the batch grows, "
        "but a schedule file has a fixed number of microbatches; use a named schedule instead of a file, or a constant "
        "batch size",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and file.microbatches != _microbatches(a),
        "--pipeline-schedule {pipeline_schedule} has {file_microbatches} microbatches, but the job has {microbatches}: "
        "use a --global-batch-size that gives every data-parallel replica {file_microbatches} microbatches",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and file.placement.stage_of[0][0],
        "--pipeline-schedule {pipeline_schedule} does not place the first stage in chunk 0 of rank 0, where Megatron "
        "reads the tokens: use a placement that does",
    ),
    Refusal(
        lambda a: (
            (file := _fixed(a))
            and not (a.vocab_parallel and not a.mtp_num_layers)
            and file.placement.chunk_of(file.placement.stages - 1) + 1 != file.chunks
        ),
        "--pipeline-schedule {pipeline_schedule} does not place the last stage in the last chunk of a rank, as is "
        "required without --vocab-parallel or with --mtp-num-layers: use a placement that does",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and file.chunks == 1 and file.placement != Placement.linear(file.pipeline_size),
        "--pipeline-schedule {pipeline_schedule} has one chunk per rank, but does not place stage r on rank r: use "
        "a placement that does",
    ),
    Refusal(
        lambda a: (file := _fixed(a)) and _starts_late(file),
        "--pipeline-schedule {pipeline_schedule} is not supported: in every chunk, the weight gradient of microbatch 0 "
        "must be computed first, because it initialises the sum; use an order in which it comes first",
    ),
)


def file_words(args: argparse.Namespace) -> dict[str, object]:
    """Return the values for the placeholders in messages about a schedule file; empty if the job uses no such file."""
    file = _fixed(args)
    if file is None:
        return {}
    return {
        "file_method": file.vocab,
        "file_ranks": file.pipeline_size,
        "file_holders": ", ".join(map(str, file.vocab_ranks)),
        "row_holders": ", ".join(map(str, _holders(args))),
        "file_microbatches": file.microbatches,
        "microbatches": _microbatches(args),
    }
