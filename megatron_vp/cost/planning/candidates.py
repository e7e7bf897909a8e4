"""Lists the candidate plans for a job. A plan combines a schedule, a vocabulary method and layer counts per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.layer_operations import WIDE
from megatron_vp.cost.layers.layer_types import head_kinds
from megatron_vp.cost.layers.layouts import least_work_layers, spread_layers
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.pattern_cuts import even_cut, letter_seconds, unit_length
from megatron_vp.cost.ranks.communication import CommunicationModel
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
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
        for layers in dict.fromkeys(_redistributed(job, placement, hardware)):
            if layers != even and len(set(layers)) > 1:
                found.append(Candidate(REDISTRIBUTED, Plan(name, chunks=own, layers=layers)))
    return found


def balanced_layers(job: Job, placement: Placement, hardware: Hardware) -> tuple[int, ...]:
    """Distribute the layers over the virtual stages so that the busiest rank has as little work as possible. The work
    includes unsplit vocabulary layers.

    For a hybrid model, each letter of its pattern counts as a layer; see `pattern_cuts.even_cut`. Raises UserError if
    there are fewer layers than middle stages, which are all stages except the first and the last.
    """
    times = PassTimes(job, hardware)
    if job.model.pattern:
        work = _vocabulary_work(times, placement)
        found = even_cut(letter_seconds(times), placement, work, may_be_empty=(0, placement.stages - 1))
    else:
        layer = sum(times.layer()) + 2 * CommunicationModel(job, hardware).layer_traffic()
        work = [0.0] * placement.ranks
        if job.fp8 is not None:
            slower = sum(times.layer("t" + WIDE)) - sum(times.layer())
            work[placement.first_rank] += job.bf16_at_start * slower
            work[placement.last_rank] += job.bf16_at_end * slower
        work = [own + more for own, more in zip(work, _vocabulary_work(times, placement), strict=True)]
        found = least_work_layers(job.model.layers, layer, work, placement)
    if found is None:
        raise UserError(too_few_layers(job, placement.stages))
    return found


def _redistributed(job: Job, placement: Placement, hardware: Hardware) -> list[tuple[int, ...]]:
    """The layouts to try with the method `redistributed`: the result of `balanced_layers` and, if the model's pattern
    repeats, the best layout that cuts only between repetitions, which is sometimes slightly faster.
    """
    found = [balanced_layers(job, placement, hardware)]
    size = unit_length(job.model.pattern)
    if 1 < size < job.model.layers:
        times = PassTimes(job, hardware)
        unit = sum(letter_seconds(times)) / job.model.layers * size
        whole = least_work_layers(job.model.layers // size, unit, _vocabulary_work(times, placement), placement)
        found += [] if whole is None else [tuple(size * count for count in whole)]
    return found


def _vocabulary_work(times: PassTimes, placement: Placement) -> list[float]:
    """Seconds per microbatch that each rank spends in unsplit vocabulary layers and in multi-token prediction."""
    work = [0.0] * placement.ranks
    work[placement.last_rank] += sum(sum(times.layer(kind)) for kind in head_kinds(times.job.model))
    work[placement.first_rank] += sum(times.whole_embedding())
    work[placement.last_rank] += sum(times.whole_output())
    return work


def _even(job: Job, placement: Placement, hardware: Hardware) -> tuple[int, ...] | None:
    """Layers per virtual stage, spread as evenly as possible; None if all stages get the same number.

    If the model has a `pattern` (see `ModelShape`), the ranks' work is evened out, not their numbers of layers.
    """
    letters = None
    if job.model.pattern:
        letters = even_cut(letter_seconds(PassTimes(job, hardware)), placement)
    if letters is None:
        return spread_layers(job, placement)
    return None if len(set(letters)) == 1 else letters


def too_few_layers(job: Job, stages: int) -> str:
    """Return the message for a job with fewer layers than virtual stages."""
    return f"{job.model.layers} layers cannot fill {stages} virtual stages; use fewer pipeline ranks or chunks"
