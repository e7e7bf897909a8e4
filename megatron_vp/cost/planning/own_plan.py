"""Settles the plan of a configuration, with the layers, rows, offloaded chunks and shape that training would choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.job_plan import plan_of
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.balanced import balanced, best_shards
from megatron_vp.cost.planning.candidates import refusal
from megatron_vp.cost.planning.measured_rows import measured_rows
from megatron_vp.cost.planning.offloading import with_chosen_offload, with_limit
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import JobConfig
from megatron_vp.jobs.virtual_stages import layers_given
from megatron_vp.jobs.vocab_shards import EVEN, EVEN_ALONE, NEEDS_VOCAB_PARALLEL, shards_of
from megatron_vp.schedule import VocabMethod, family


def own_plan(config: JobConfig, job: Job, hardware: Hardware, limit: float | None = None) -> Plan:
    """The plan as training would run it within `limit` bytes per rank.

    Raises UserError if the configuration contradicts itself or the job, or if nothing fits.
    """
    plan = with_chosen_offload(config, plan_of(config), job, hardware, limit)
    plan, activations = with_shards(config, plan, job, hardware, limit), config.get("activation_limit")
    return plan if activations is None else with_limit(job, plan, hardware, str(activations))


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
    given = config.get("vocab_shards")
    choice, said = shards_of(given), {"vocab_shards": given, "pipeline_schedule": plan.schedule}
    if plan.vocab is VocabMethod.NONE and given is not None:
        raise UserError(NEEDS_VOCAB_PARALLEL.format_map(said))
    if plan.vocab is VocabMethod.INTERLACED and isinstance(choice, tuple | Path):
        raise UserError(EVEN_ALONE.format_map(said))
    if not plan.vocab.is_sharded or choice == EVEN:
        return plan
    if isinstance(choice, tuple):
        return replace(plan, vocab_rows=choice)
    if isinstance(choice, Path):
        sizes = {"padded_vocab_size": job.model.vocab, "pipeline_model_parallel_size": job.pipeline}
        own = {"pipeline_schedule": plan.schedule, "vocab_parallel_algorithm": str(plan.vocab)}
        layers, rows, _ = measured_rows(choice, {**config, **sizes, **own}, layers_given(config))
        return replace(plan, layers=layers, vocab_rows=rows)
    choose = best_shards if may_stay_whole(config, plan) else balanced
    return choose(job, plan, hardware, memory_limit or hardware.memory, layers_given(config) is not None)[0]


def may_stay_whole(config: Mapping[str, Any], plan: Plan) -> bool:
    """Whether `--vocab-parallel` may keep Megatron's own vocabulary layers in the job of `plan`, where they are faster.

    It may not if the user named an algorithm, or options that are for split layers alone.
    """
    whole = replace(plan, vocab=VocabMethod.NONE)
    asked = map(config.get, ("vocab_parallel_algorithm", "vocab_label_smoothing", "vocab_z_loss", "activation_limit"))
    able = VocabMethod.NONE in family(plan.schedule).methods and not plan.offload_chunks
    return able and not any(asked) and refusal(config, whole) is None
