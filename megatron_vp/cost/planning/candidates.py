"""Lists the candidate plans for a job. A plan combines a schedule, a vocabulary method and layer counts per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.job_plan import dropped
from megatron_vp.cost.layers.layer_types import head_kinds
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.layer_division import divided, layer_seconds, sloping
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.jobs.options import OPTIONS
from megatron_vp.schedule import FAMILIES, Placement, VocabMethod, family

MOST_BALANCED = 16
"""With more pipeline ranks than this, `plan` does not balance the vocabulary shards, because balancing takes a few
simulations per candidate.
"""

LARGEST = 128
"""Largest number of pipeline ranks for which `plan` predicts candidates. At this number, `plan` takes half a minute on
two cores.
"""


def refusal(values: Mapping[str, Any], plan: Plan) -> str | None:
    """Why training refuses `plan` for a job with these arguments, as far as our own options tell; see `OPTIONS`."""
    values = {**values, **dropped(values, plan)}
    record, split, given = family(plan.schedule), plan.vocab is not VocabMethod.NONE, Arguments.given(values)
    holds = {
        "our schedules": split or not record.in_megatron or plan.offload_chunks,
        "vocabulary shards": split,
        "moved weights": split or not record.in_rounds,
        "W": record.splits_backward,
        "V": not record.ends_on_last_rank,
        "V without shards": not split and not record.ends_on_last_rank,
        "offload": plan.offload_chunks,
    }
    ours = "--vocab-parallel" if split else f"--pipeline-schedule {plan.schedule}"
    said = {"our_schedule": ours, "pipeline_schedule": plan.schedule, "offload_chunks": plan.offload_chunks}
    for option in OPTIONS:
        if holds.get(option.run) and not option.does and (called := option.found(lambda name: getattr(given, name))):
            return option.message(called, ours).format_map({**values, **said})
    return None


def check_pipeline(job: Job) -> None:
    """Raise UserError for a job with more than LARGEST pipeline ranks, or with fewer layers than pipeline ranks."""
    if job.pipeline > job.model.layers:
        raise UserError(
            f"no schedule can run this job: {job.model.layers} layers cannot fill {job.pipeline} pipeline ranks; use "
            "fewer pipeline ranks"
        )
    if job.pipeline > LARGEST:
        raise UserError(
            f"{job.pipeline} pipeline ranks are too many for megatron-vp plan, which tries every schedule: give "
            f"at most {LARGEST}, or simulate one schedule at a time with megatron-vp simulate --pipeline-schedule NAME"
        )


def placed_heads(job: Job) -> list[Job]:
    """The job with its multi-token prediction heads on the last stage and, where Megatron supports this, also with a
    stage of their own before a last stage that has only the output layer.
    """
    model = job.model
    behind = (0, 1) if model.mtp_heads and not model.is_hybrid and job.pipeline > 2 else (0,)
    return [replace(job, model=replace(model, behind_mtp=count)) for count in behind]


def candidates(job: Job, hardware: Hardware, chunks: int = 2, offload: bool = False) -> list[Plan]:
    """Combine every schedule that `plan` considers with each vocabulary method that it supports and, without splitting
    the vocabulary, with several layouts.

    `chunks` applies to `interleaved` and to other families that allow any number of chunks. `offload` adds the
    schedules that are made for offloading. Without a pipeline, there is only one candidate; with a pipeline that
    `check_pipeline` refuses, there is none. If multi-token prediction has a stage of its own, only Megatron's own
    schedules are candidates.
    """
    if job.pipeline == 1:
        return [Plan()]
    if job.pipeline > min(LARGEST, job.model.layers):
        return []
    found = []
    for name, record in FAMILIES.items():
        own = chunks if record.chunks is None else None
        placement = record.placement_of(job.pipeline, own)
        by_hand = [_layout_by_hand(job, placement.stages)] if record.in_megatron else []
        if job.model.behind_mtp:
            layouts = by_hand
        elif record.planned or (offload and not record.bases):
            even = _even(job, placement, hardware)
            found += [Plan(name, vocab, own, even) for vocab in record.methods]
            if VocabMethod.NONE not in record.methods or job.model.layers < placement.stages:
                continue
            layouts = [balanced_layers(job, placement, hardware), *by_hand]
        else:
            continue
        found += [Plan(name, chunks=own, layers=layers) for layers in layouts if layers and len({*layers}) > 1]
    return list(dict.fromkeys(found))


def _layout_by_hand(job: Job, stages: int) -> tuple[int, ...] | None:
    """Layers per virtual stage as people distribute them: equally, with the embedding, each multi-token prediction head
    and the output layer counted as layers. If the heads and the output layer have stages of their own, the other stages
    share the layers as evenly as possible. None if this leaves a stage empty.
    """
    if job.model.behind_mtp:
        first, *others = even_layers(job.model.layers + 1, stages - 2)
        return (first - 1, *others, 0, 0) if first and 0 not in others else None
    behind = 1 + len(job.model.mtp_heads)
    each, rest = divmod(job.model.layers + 1 + behind, stages)
    return None if rest or each < max(2, behind) else (each - 1, *[each] * (stages - 2), each - behind)


def balanced_layers(job: Job, placement: Placement, hardware: Hardware) -> tuple[int, ...]:
    """Distribute the layers over the virtual stages so that the busiest rank has as little work as possible. The work
    includes unsplit vocabulary layers.

    Raises UserError if there are fewer layers than middle stages, which are all stages except the first and the last.
    """
    times = PassTimes(job, hardware)
    layers = layer_seconds(times)
    work = sloping(layers, placement.ranks)  # Earlier ranks have more time for layers, while the pipeline fills.
    work[placement.last_rank] += sum(sum(times.layer(kind)) for kind in head_kinds(job.model))
    work[placement.first_rank] += sum(times.whole_embedding())
    work[placement.last_rank] += sum(times.whole_output())
    found = divided(layers, placement, work, may_be_empty=(0, placement.stages - 1))
    assert found is not None, "fewer layers than stages"
    return found


def _even(job: Job, placement: Placement, hardware: Hardware) -> tuple[int, ...] | None:
    """Layers per virtual stage, with which the ranks have equal work as far as possible; None if equally many or if
    there are too few.

    Stages of a model whose layers are all alike get equally many layers if possible.
    """
    if not job.model.pattern and not job.model.layers % placement.stages:
        return None
    layers = divided(layer_seconds(PassTimes(job, hardware)), placement)
    return layers if layers and len({*layers}) > 1 else None
