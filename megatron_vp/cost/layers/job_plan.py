"""Reads a job's plan from its configuration, and lists the settings to change for another plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.job_sizes import job_of, modules_in
from megatron_vp.cost.layers.layer_operations import LAYERS, OFFLOADED
from megatron_vp.cost.layers.layouts import equal_layers
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.job_config import ALGORITHM_ALONE, JobConfig
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.jobs.layout_text import even_layers, layers_in, layout_of, stages_behind_mtp
from megatron_vp.jobs.options import UNCOUNTED
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.jobs.virtual_stages import (
    ENDS,
    SHIFTED_V,
    chunks_asked,
    layers_given,
    shifted_layers,
    shifts_given,
)
from megatron_vp.schedule import DEFAULT_SCHEDULE, Family, VocabMethod, family, megatrons_own
from megatron_vp.schedule.request import AUTO, chunks_to_offload

COUNTED_MODULES = {"mlp", "moe", "moe_act", "shared_experts", "core_attn", "layernorm", "mla_up_proj", "gdn_norm_out"}
"""The values of `--recompute-modules` whose effect on memory and time is counted; see `layer_operations.Op`."""


def uncounted(config: JobConfig) -> list[str]:
    """List the job's options whose effect on time or memory the cost model ignores, at least in part."""
    values = config
    found = [
        option_of(name)
        for name, harmless in UNCOUNTED.items()
        if values.get(name) not in (None, False) and values[name] not in harmless
    ]
    if values.get("attention_backend") == "unfused":
        found.append("--attention-backend")
    if not str(values.get("window_attn_skip_freq") or 0).isdigit():
        found.append("--window-attn-skip-freq (a list of layers; all are counted without a window)")
    if values.get("recompute_granularity") == "selective":
        unknown = sorted(modules_in(values, "recompute_modules").difference(COUNTED_MODULES))
        if unknown:
            found.append(f"--recompute-granularity selective ({', '.join(unknown)})")
    away = {*modules_in(values, "offload_modules")}.difference(OFFLOADED.values())
    if away and values.get("fine_grained_activation_offloading"):
        found.append(f"--offload-modules ({', '.join(sorted(away))})")
    pattern = pattern_in(values)
    if pattern is None:
        return found
    letters = sorted(set(pattern.letters) - {*LAYERS})
    if letters:
        found.append(f"--hybrid-layer-pattern ({', '.join(letters)}: counted as attention *)")
    return found


def assumed(job: Job, hardware: Hardware) -> list[str]:
    """List the assumptions that a prediction makes about settings that the job leaves open, each with the option that
    would make it unnecessary, if there is one.
    """
    found = []
    older = hardware.rates is not None and hardware.rates.flash_attention_2 is not None
    if 0 < job.flash_attention_2 < 1 and older and job.layers is LayerKind.ENGINE:
        found.append(
            "attention time is the mean of the times of FlashAttention 2 and cuDNN 9, because published runs with "
            "delayed scaling used one or the other; choose one with --attention-backend flash or fused"
        )
    if not job.dispatcher and job.expert > 1:
        kind = "flex" if job.is_flexible else "alltoall"
        found.append(
            f"--moe-token-dispatcher-type is {kind}, as in published recipes; the prediction does not cover Megatron's "
            "default, allgather, which moves more data"
        )
    if job.graphs in ("local", "transformer_engine"):
        found.append(
            f"--cuda-graph-impl {job.graphs} saves no time, because only its full_iteration is assumed to spare the "
            "GPUs their waits for launches, and its static buffers take no memory"
        )
    if job.offloaded_modules:
        found.append("copies of --fine-grained-activation-offloading are hidden behind the passes")
    return found


def plan_of(config: JobConfig) -> Plan:
    """Read the plan that the configuration itself describes. Raises UserError for contradictory options."""
    chosen, values = _chosen(config), config
    for name in () if pattern_in(values) is None else _LAYOUT_OPTIONS:
        if values.get(name) not in (None, False):
            raise UserError(
                f"{option_of(name)} cannot be combined with --hybrid-layer-pattern: remove it, and divide the pattern "
                "with bars (*-|*-) into one segment per stage"
            )
    if not chosen.in_rounds and shifts_given(values):
        raise UserError(SHIFTED_V.format(pipeline_schedule=chosen.name))
    chunks, offload = _chunks(config), str(values.get("offload_chunks") or 0)
    split, algorithm = values.get("vocab_parallel") is True, values.get("vocab_parallel_algorithm")
    if not split and algorithm is not None:
        raise UserError(ALGORITHM_ALONE.format_map(values))
    vocab = VocabMethod(algorithm or VocabMethod.VOCAB_2) if split else VocabMethod.NONE
    if chosen.name == DEFAULT_SCHEDULE and not split and offload == "0":
        chosen = megatrons_own(chunks)
    own = chosen.own_method
    if own is not None:
        if not split:
            raise UserError(f"--pipeline-schedule {chosen.name} splits the vocabulary: add --vocab-parallel")
        if own.is_sharded and vocab != own:
            raise UserError(
                f"--pipeline-schedule {chosen.name} runs the passes of {own}, but --vocab-parallel-algorithm is "
                f"{vocab}: use --vocab-parallel-algorithm {own}"
            )
        vocab = own
    layers, own_chunks = layers_given(values), chosen.chunks or 1
    if layers is None and own_chunks > 1:
        job = job_of(values)
        even = even_layers(job.model.layers, job.pipeline * own_chunks)
        layers = even if len(set(even)) > 1 else None
    offload_chunks = 0 if offload in ("0", AUTO) else chunks_to_offload(offload, chosen.chunks_of(chunks))
    return Plan(chosen.name, vocab, chunks, layers, offload_chunks=offload_chunks)


def default_schedule(arguments: Mapping[str, Any]) -> Family:
    """The schedule of a job that does not name one, with or without vocabulary parallelism: 1f1b or, with virtual
    stages, interleaved. `arguments` are as in `chunks_asked`.
    """
    return megatrons_own(chunks_asked(arguments))


def _chosen(config: JobConfig) -> Family:
    asked = config.get("pipeline_schedule")
    return default_schedule(config) if asked is None else family(str(asked))


_LAYOUT_OPTIONS = (
    "pipeline_model_parallel_layout",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    *ENDS,
)
"""Arguments that divide a GPT model into stages. A hybrid model is divided by bars in --hybrid-layer-pattern."""


def settings_of(config: JobConfig, plan: Plan, job: Job) -> dict[str, Any]:
    """Arguments, by long name, that make this configuration run `plan`; None and False unset an argument."""
    chunks, split = plan.chunks, plan.vocab is not VocabMethod.NONE
    # Megatron's own schedules, 1f1b and interleaved, need no option if the vocabulary is not split.
    own = not split and plan.schedule == megatrons_own(chunks).name
    bars = bars_of(config, plan, job)
    if bars is None:
        layout = _layout_settings(config, plan, job)
    else:
        layout = {"hybrid_layer_pattern": bars, "hybrid_override_pattern": None, **dict.fromkeys(_LAYOUT_OPTIONS)}
        layout |= dict.fromkeys(shifts_given(config))
    wanted = {
        "vocab_parallel": split,
        "vocab_parallel_algorithm": plan.vocab.value if plan.vocab.is_sharded else None,
        "vocab_shards": _shards_text(plan),
        "pipeline_schedule": DEFAULT_SCHEDULE if own else plan.schedule,
        "activation_limit": plan.activation_limit or None,
        "offload_chunks": plan.offload_chunks or None,
        **layout,
        **dropped(config, plan),
    }
    defaults = {"vocab_parallel": False, "pipeline_schedule": DEFAULT_SCHEDULE}
    settings = {name: value for name, value in wanted.items() if value != config.get(name, defaults.get(name))}
    if plan.vocab.is_sharded:  # The settings name the algorithm even if it is the default.
        settings.setdefault("vocab_parallel_algorithm", plan.vocab.value)
    return settings


def dropped(values: Mapping[str, Any], plan: Plan) -> dict[str, None]:
    """The job's options that `plan` must leave out, because its schedule has no passes that run as one, or because
    Megatron runs none as one with these sizes.
    """
    options = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"
    stages, experts = (values.get(f"{name}_model_parallel_size") or 1 for name in ("pipeline", "expert"))
    kept = (stages == 1 or plan.has_pairs) and experts > 1 and values.get("recompute_granularity") != "full"
    return {} if kept or not values.get(options[0]) else {name: None for name in options if values.get(name)}


def _stages(plan: Plan, job: Job) -> int:
    return job.pipeline * (plan.chunks or family(plan.schedule).chunks or 1)


def _layout_settings(config: JobConfig, plan: Plan, job: Job) -> dict[str, Any]:
    layers, layout = plan.layers, config.get("pipeline_model_parallel_layout")
    kept = layout is None and layers == shifted_layers(config) and family(plan.schedule).in_rounds
    if layers is None and layout is not None:
        layers = equal_layers(job, _stages(plan, job))
    behind = job.model.behind_mtp
    own = layout and (layers_in(str(layout)), stages_behind_mtp(str(layout)))
    if layers is not None and not kept and own != (layers, behind):
        layout = layout_of(layers, config.get("mtp_num_layers") or 0, behind)
    return {
        **dict.fromkeys([] if kept else shifts_given(config)),
        "pipeline_model_parallel_layout": layout,
        "num_virtual_stages_per_pipeline_rank": plan.chunks if layout is None else None,
        "num_layers_per_virtual_pipeline_stage": None,
    }


def bars_of(config: JobConfig, plan: Plan, job: Job) -> str | None:
    """A hybrid model's pattern, with bars between the stages of `plan`; None for a GPT model.

    Bars are always written, because Megatron deprecates pipeline parallelism with a pattern that has none.
    """
    pattern = pattern_in(config)
    return None if pattern is None else pattern.with_bars(plan.layers or equal_layers(job, _stages(plan, job)))


def _shards_text(plan: Plan) -> str | None:
    """The value of --vocab-shards for the plan's rows. Without this option, training may split the vocabulary
    differently.
    """
    if not plan.vocab.is_sharded:
        return None
    return "even" if plan.vocab_rows is None else ",".join(map(str, plan.vocab_rows))


def chunks_given(config: JobConfig) -> int | None:
    """The configuration's number of chunks per rank; None if the number is 1, not given, or invalid."""
    try:
        return _chunks(config)
    except UserError:
        return None


def _chunks(config: JobConfig) -> int | None:
    chunks, chosen = chunks_asked(config), _chosen(config)
    each = config.get("num_layers_per_virtual_pipeline_stage")
    if each is not None:
        job = job_of(config)
        layers = job.model.layers + sum(config.get(name) is True for name in ENDS)
        if layers != (chunks or 1) * job.pipeline * each:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage {each} does not divide {layers} layers into equally many "
                f"stages for each of {job.pipeline} pipeline ranks; choose a number that does"
            )
    if layers_given(config) is not None and chosen.chunks not in (1, None):
        return None  # A layout that does not match the schedule's own number of chunks is refused later.
    if chosen.chunks is None and (chunks or 1) == 1:
        needed = option_of("num_virtual_stages_per_pipeline_rank")
        raise UserError(f"--pipeline-schedule {chosen.name} needs at least two chunks per rank: add {needed} 2")
    return None if chunks == 1 else chunks
