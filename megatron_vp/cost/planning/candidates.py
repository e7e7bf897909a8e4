"""Lists the candidate plans for a job. A plan combines a schedule, a vocabulary method and layer counts per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.layer_types import head_kinds
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.layer_division import divided, layer_seconds, sloping
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.jobs.options import OPTIONS
from megatron_vp.schedule import FAMILIES, Placement, VocabMethod, family

PLAIN, REDISTRIBUTED = "plain", "redistributed"
"""Methods without vocabulary parallelism: layers spread evenly, or fewer layers on ranks with vocabulary layers."""

WITHOUT_SPLIT = (PLAIN, REDISTRIBUTED)

MOST_BALANCED = 16
"""With more pipeline ranks than this, `plan` does not balance the vocabulary shards, because balancing takes a few
simulations per candidate.
"""

LARGEST = 128
"""Largest number of pipeline ranks for which `plan` predicts candidates. At this number, `plan` takes half a minute on
two cores.
"""


@dataclass(frozen=True)
class Candidate:
    """A plan and the name of its method: plain, redistributed, vocab-1, vocab-2 or interlaced."""

    method: str
    plan: Plan

    @property
    def title(self) -> str:
        """The method, and whether the vocabulary shards are balanced."""
        return self.method + (", balanced" if self.plan.vocab_rows else "")

    @property
    def name(self) -> str:
        """The candidate's name in sentences and charts."""
        return f"{self.plan.label}, {self.title}" + (" shards" if self.plan.vocab_rows else "")

    @property
    def without_split(self) -> bool:
        """Whether the run has no vocabulary parallelism."""
        return self.method in WITHOUT_SPLIT

    @property
    def in_megatron(self) -> bool:
        """Whether Megatron itself supports the run."""
        return self.without_split and family(self.plan.schedule).in_megatron and not self.plan.offload_chunks


def refusal(values: Mapping[str, Any], plan: Plan) -> str | None:
    """Why training refuses `plan` for a job with these arguments, as far as our own options tell; see `OPTIONS`."""
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


def method_of(plan: Plan) -> str:
    """The name of the method that a plan uses (see `Candidate`)."""
    if plan.vocab is not VocabMethod.NONE:
        return str(plan.vocab)
    return PLAIN if plan.layers is None or len(set(plan.layers)) == 1 else REDISTRIBUTED


def check_pipeline(job: Job) -> None:
    """Raise UserError for a job without a pipeline, with more than LARGEST pipeline ranks, or with fewer layers than
    pipeline ranks.
    """
    if job.pipeline < 2:
        raise UserError("a job with one pipeline stage needs no plan; set --pipeline-model-parallel-size to 2 or more")
    if job.pipeline > job.model.layers:
        raise UserError(f"no schedule can run this job: {too_few_layers(job, job.pipeline)}")
    if job.pipeline > LARGEST:
        raise UserError(
            f"{job.pipeline} pipeline ranks are too many for megatron-vp plan, which tries every schedule: give "
            f"at most {LARGEST}, or simulate one schedule at a time with megatron-vp simulate --pipeline-schedule NAME"
        )


def candidates(job: Job, hardware: Hardware, chunks: int = 2, offload: bool = False) -> list[Candidate]:
    """Combine every schedule that `plan` considers with each method that it supports (see `Candidate`).

    `chunks` applies to `interleaved` and to other families that allow any number of chunks. `offload` adds the
    schedules that are made for offloading. Without a pipeline, there is only one candidate; with a pipeline that
    `check_pipeline` refuses, there is none.
    """
    if job.pipeline == 1:
        return [Candidate(PLAIN, Plan())]
    if job.pipeline > min(LARGEST, job.model.layers):
        return []
    found = []
    for name, record in FAMILIES.items():
        if not (record.planned or (offload and not record.bases)):
            continue
        own = chunks if record.chunks is None else None
        placement = record.placement_of(job.pipeline, own)
        even = _even(job, placement, hardware)
        for vocab in record.methods:
            method = PLAIN if vocab is VocabMethod.NONE else str(vocab)
            found.append(Candidate(method, Plan(name, vocab, own, even)))
        if VocabMethod.NONE not in record.methods or job.model.layers < placement.stages:
            continue
        layers = balanced_layers(job, placement, hardware)
        if layers != even and len({*layers}) > 1:
            found.append(Candidate(REDISTRIBUTED, Plan(name, chunks=own, layers=layers)))
    return found


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
    if found is None:
        raise UserError(too_few_layers(job, placement.stages))
    return found


def _even(job: Job, placement: Placement, hardware: Hardware) -> tuple[int, ...] | None:
    """Layers per virtual stage, with which the ranks have equal work as far as possible; None if equally many.

    Stages of a model whose layers are all alike get equally many layers if possible.
    """
    if not job.model.pattern and not job.model.layers % placement.stages:
        return None
    layers = divided(layer_seconds(PassTimes(job, hardware)), placement)
    layers = layers or even_layers(job.model.layers, placement.stages)
    return None if len({*layers}) == 1 else layers


def too_few_layers(job: Job, stages: int) -> str:
    """Return the message for a job with fewer layers than virtual stages."""
    return f"{job.model.layers} layers cannot fill {stages} virtual stages; use fewer pipeline ranks or chunks"
