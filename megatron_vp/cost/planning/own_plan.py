"""Settles the plan of a configuration, with the layers, rows, offloaded chunks and shape that training would choose, or
with those of an earlier run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.job_plan import plan_of
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.balanced import balanced, most_rows
from megatron_vp.cost.planning.measured_rows import MeasuredJob, next_rows
from megatron_vp.cost.planning.offloading import with_chosen_offload, with_given_limit
from megatron_vp.cost.planning.stage_costs import single_microbatch
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.jobs.virtual_stages import layers_given
from megatron_vp.jobs.vocab_shards import EVEN_ALONE, NEEDS_VOCAB_PARALLEL, ShardChoice, ShardRule
from megatron_vp.schedule import StageCosts, VocabMethod
from megatron_vp.trace.figures import mean_costs
from megatron_vp.trace.partition import Partition
from megatron_vp.trace.rank_files import read_traces


def own_plan(
    config: JobConfig, job: Job, hardware: Hardware, limit: float | None = None, partition: Partition | None = None
) -> Plan:
    """The plan as training would run it within `limit` bytes per rank. If given, `partition` sets layers and rows.

    Raises UserError if the configuration contradicts itself or the job, or if nothing fits.
    """
    plan = with_chosen_offload(config, plan_of(config), job, hardware, limit)
    shards = with_partition(plan, partition) if partition else with_shards(config, plan, job, hardware, limit)
    return with_given_limit(config, shards, job, hardware)


def shard_choice(config: JobConfig, plan: Plan) -> ShardChoice:
    """Read the job's `--vocab-shards`. Raises UserError if the vocabulary method does not support the given value."""
    given = config.get("vocab_shards")
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    choice = ShardChoice.parse(given)
    said = {"vocab_shards": given, "pipeline_schedule": plan.schedule}
    if plan.vocab is VocabMethod.NONE and given is not None:
        raise UserError(NEEDS_VOCAB_PARALLEL.format_map(said))
    if plan.vocab is VocabMethod.INTERLACED and choice.rule not in (ShardRule.EVEN, ShardRule.BALANCED):
        raise UserError(EVEN_ALONE.format_map(said))
    return choice


def with_shards(
    config: JobConfig,
    plan: Plan,
    job: Job,
    hardware: Hardware,
    memory_limit: float | None = None,
) -> Plan:
    """Return a configuration's `plan` with the layers and rows that training would use.

    Raises UserError if the given `--vocab-shards` cannot be used for this job.
    """
    choice = shard_choice(config, plan)
    if not plan.vocab.is_sharded or choice.rule is ShardRule.EVEN:
        return plan
    layout_given = layers_given(config) is not None
    if choice.rule is ShardRule.ROWS:
        return replace(plan, vocab_rows=choice.rows)
    if choice.rule is ShardRule.BALANCED:
        return balanced(job, plan, hardware, memory_limit, layout_given).plan(plan)
    assert choice.folder is not None

    def room(partition: Partition) -> tuple[int, ...] | None:
        if memory_limit is None:
            return None
        return most_rows(job, with_partition(plan, partition), hardware, memory_limit)

    return next_rows(choice.folder, measured_job(config, plan, job), room).plan(plan)


def measured_job(config: JobConfig, plan: Plan, job: Job) -> MeasuredJob:
    """The properties that a measured run must have in common with this job."""
    layers = None if layers_given(config) is None else plan.layers
    sizes = job.pipeline, job.tensor, job.model.vocab
    method = plan.vocab.value
    return MeasuredJob(*sizes, plan.schedule, method, config, layers)


def with_partition(plan: Plan, partition: Partition) -> Plan:
    """Return `plan` with the rows of `partition`, and with `partition.layers` if it is not None."""
    return replace(plan, layers=partition.layers or plan.layers, vocab_rows=partition.vocab_rows)


def traced_costs(folder: Path, job: Job, plan: Plan) -> StageCosts:
    """Mean pass and collective times, in seconds, of the run that wrote its trace to `folder` with `--pipeline-trace`.

    Raises UserError if the folder holds no trace, or if the traced run differs from `job` and `plan` in schedule,
    vocabulary method or placement.
    """
    first, *_ = traces = read_traces(folder)
    ours = single_microbatch(plan, job)
    if (first.schedule, first.vocab, first.placement) != (ours.name, ours.vocab, ours.placement.stage_of):
        raise UserError(
            f"{folder} is the trace of a run with {_words(first.schedule, first.vocab, first.placement)}, but this job "
            f"has {_words(ours.name, ours.vocab, ours.placement.stage_of)}: simulate the job that was traced"
        )
    return mean_costs(traces).scaled(1e-3)


def _words(schedule: str, vocab: str, placement: tuple[tuple[int, ...], ...]) -> str:
    stages = sum(map(len, placement))
    return f"schedule {schedule}, vocab method {vocab}, {len(placement)} ranks and {stages} virtual stages"
