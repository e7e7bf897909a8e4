"""Which schedule and vocabulary method to run a job with: every candidate predicted, ranked, and what bounds it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_vp.cost.balance.balanced import balanced
from megatron_vp.cost.balance.pattern_cuts import even_cut, letter_seconds, unit_length
from megatron_vp.cost.hardware.constants import CALIBRATED, ERROR_BAND, Constants
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.memory.rank_memory import RankMemory
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.cost.prediction.predict import Prediction, make_simulator, predict
from megatron_vp.cost.prediction.samples import extended, sampled
from megatron_vp.cost.sizes.layer_types import type_of
from megatron_vp.cost.sizes.layouts import least_work_layers, spread_layers
from megatron_vp.cost.sizes.shapes import Job, Plan
from megatron_vp.cost.times.communication import CommunicationModel
from megatron_vp.cost.times.pass_times import PassTimes
from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Placement,
    Simulator,
    StageCosts,
    VocabMethod,
    family,
)
from megatron_vp.schedule.gc_paused import gc_paused

PLAIN, REDISTRIBUTED = "plain", "redistributed"
"""Whole vocabulary layers on the first and last stage; with layers spread evenly, or so that no rank has too much."""

SMALL = 0.05
"""Share of the iteration below which a loss of time is not worth a name."""


MOST_BALANCED = 16
"""Pipeline ranks up to which a plan balances shards, in some simulations each. `simulate` does so for any number."""

LARGEST = 128
"""Pipeline ranks whose candidates take half a minute on two cores; twice as many take over four times as long."""


@dataclass(frozen=True)
class Candidate:
    """A plan and the name of its method: plain, redistributed, vocab-1, vocab-2 or interlaced."""

    method: str
    plan: Plan


@dataclass(frozen=True)
class Loss:
    """Where the seconds of an iteration go, beyond the mean rank's work: they sum up to the iteration.

    work: of the mean rank. imbalance: what the busiest rank works more. bubble: waits of the busiest rank that would be
    there if communication were free. communication: what communication adds. step: after the passes, gradient
    synchronisation and optimizer.
    """

    work: float
    imbalance: float
    bubble: float
    communication: float
    step: float

    def largest(self) -> str:
        """Name of what costs most beside the work, or `compute` where nothing costs much."""
        names = ("imbalance", "bubble", "communication", "step")
        name = max(names, key=lambda each: getattr(self, each))
        total = self.work + sum(getattr(self, each) for each in names)
        return name if getattr(self, name) >= SMALL * total else "compute"


@dataclass(frozen=True)
class Evaluation:
    """What a candidate makes of the job. Seconds and bytes; `busy` and `memory` by pipeline rank."""

    candidate: Candidate
    iteration_seconds: float
    mfu: float
    tokens_per_second: float
    bubble_fraction: float
    busy: tuple[float, ...]
    memory: tuple[RankMemory, ...]
    loss: Loss
    vocab_rows: tuple[int, ...] | None = None
    """Rows of the vocabulary by pipeline rank, tensor ranks together; None where it is not split."""

    @property
    def peak_memory(self) -> float:
        """Bytes that the fullest rank must have."""
        return max(rank.total for rank in self.memory)

    def fits(self, limit: float) -> bool:
        """Whether every rank stays within `limit` bytes."""
        return self.peak_memory <= limit

    def is_tight(self, limit: float) -> bool:
        """Whether memory may exceed `limit` bytes by the stated error of a prediction."""
        return (1 + ERROR_BAND["memory"]) * self.peak_memory > limit

    def bound_by(self, limit: float) -> str:
        """What keeps this candidate from being better, in a word or two."""
        if not self.fits(limit):
            return "memory"
        largest = self.loss.largest()
        if largest == "imbalance":
            return f"rank {self.busy.index(max(self.busy))}"
        return largest

    def document(self, limit: float) -> dict[str, Any]:
        """For programs; seconds and bytes, times and memory by rank."""
        plan = self.candidate.plan
        return {
            "schedule": plan.schedule,
            "method": self.candidate.method,
            "chunks": plan.chunks,
            "layers": plan.layers,
            "vocab_rows": self.vocab_rows,
            "offload_chunks": 0,
            "iteration_seconds": self.iteration_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "seconds": asdict(self.loss),
            "busy_seconds": self.busy,
            "peak_memory_bytes": self.peak_memory,
            "memory_bytes": [rank.parts() for rank in self.memory],
            "outside_bytes": [rank.outside.parts() for rank in self.memory],
            "communicators": [rank.outside.communicators for rank in self.memory],
            "fits": self.fits(limit),
            "free_bytes": limit - self.peak_memory,
            "tight": self.is_tight(limit),
            "bound_by": self.bound_by(limit),
        }


@dataclass(frozen=True)
class Infeasible:
    """A candidate that the job cannot run, and why."""

    candidate: Candidate
    reason: str


def method_of(plan: Plan) -> str:
    """The name of a plan's method."""
    if plan.vocab is not VocabMethod.NONE:
        return str(plan.vocab)
    return PLAIN if plan.layers is None or len(set(plan.layers)) == 1 else REDISTRIBUTED


def candidates(job: Job, hardware: Hardware, constants: Constants = CALIBRATED, chunks: int = 2) -> list[Candidate]:
    """Every schedule with every method that it has, on as even a layout as layers allow.

    `chunks` are those of `interleaved`.

    Raises UserError for a job without a pipeline, with more than LARGEST ranks in it, or with fewer layers than that.
    """
    if job.pipeline < 2:
        raise UserError("one pipeline stage leaves nothing to plan; set --pipeline-model-parallel-size to 2 or more")
    if job.pipeline > job.model.layers:
        raise UserError(f"no schedule can run this job: {_too_few_layers(job, job.pipeline)}")
    if job.pipeline > LARGEST:
        raise UserError(
            f"a plan tries every schedule, which takes too long for {job.pipeline} pipeline ranks: "
            f"give at most {LARGEST}, or ask megatron-vp simulate for one schedule at a time (--pipeline-schedule NAME)"
        )
    found = []
    for name, record in FAMILIES.items():
        if not record.planned:
            continue
        own = chunks if record.chunks is None else None
        placement = record.placement_of(job.pipeline, own)
        even = _even(job, placement, hardware, constants)
        for vocab in record.methods:
            method = PLAIN if vocab is VocabMethod.NONE else str(vocab)
            found.append(Candidate(method, Plan(name, vocab, own, even)))
        if VocabMethod.NONE not in record.methods or job.model.layers < placement.stages:
            continue
        for layers in dict.fromkeys(_redistributed(job, placement, hardware, constants)):
            if layers != even and len(set(layers)) > 1:
                found.append(Candidate(REDISTRIBUTED, Plan(name, chunks=own, layers=layers)))
    return found


def balanced_layers(
    job: Job, placement: Placement, hardware: Hardware, constants: Constants = CALIBRATED
) -> tuple[int, ...]:
    """Layers by virtual stage for which the busiest rank, vocabulary layers included, has the least work there can be.

    Of a hybrid model the letters of its pattern: see `pattern_cuts.even_cut`.
    Raises UserError where there are fewer layers than stages between the first and the last.
    """
    times = PassTimes(job, hardware, constants)
    if job.model.pattern:
        work = _vocabulary_work(times, placement)
        found = even_cut(letter_seconds(times), placement, work, may_be_empty=(0, placement.stages - 1))
    else:
        layer = sum(times.layer()) + 2 * CommunicationModel(job, hardware, constants).layer_traffic()
        work = [0.0] * placement.ranks
        if job.fp8 is not None:
            slower = sum(times.plain_layer()) - sum(times.layer())
            work[placement.first_rank] += job.bf16_at_start * slower
            work[placement.last_rank] += job.bf16_at_end * slower
        work = [own + more for own, more in zip(work, _vocabulary_work(times, placement), strict=True)]
        found = least_work_layers(job.model.layers, layer, work, placement)
    if found is None:
        raise UserError(_too_few_layers(job, placement.stages))
    return found


def _redistributed(job: Job, placement: Placement, hardware: Hardware, constants: Constants) -> list[tuple[int, ...]]:
    """The layouts that `redistributed` stands for: `balanced_layers`, and for a pattern that repeats the best one
    between whole repetitions, too, which is at times a little faster.
    """
    found = [balanced_layers(job, placement, hardware, constants)]
    size = unit_length(job.model.pattern)
    if 1 < size < job.model.layers:
        times = PassTimes(job, hardware, constants)
        unit = sum(letter_seconds(times)) / job.model.layers * size
        whole = least_work_layers(job.model.layers // size, unit, _vocabulary_work(times, placement), placement)
        found += [] if whole is None else [tuple(size * count for count in whole)]
    return found


def _vocabulary_work(times: PassTimes, placement: Placement) -> list[float]:
    """Seconds of whole vocabulary layers by rank, in all passes of a microbatch; and of multi-token prediction."""
    work = [0.0] * placement.ranks
    work[placement.last_rank] += sum(sum(times.layer(type_of(letter))) for letter in "".join(times.job.model.mtp_heads))
    work[placement.first_rank] += sum(times.whole_embedding())
    work[placement.last_rank] += sum(times.whole_output())
    return work


def _even(job: Job, placement: Placement, hardware: Hardware, constants: Constants) -> tuple[int, ...] | None:
    """As even a layout as whole layers allow, of a hybrid model as letters allow; None for equally many per stage."""
    letters = None
    if job.model.pattern:
        letters = even_cut(letter_seconds(PassTimes(job, hardware, constants)), placement)
    if letters is None:
        return spread_layers(job, placement)
    return None if len(set(letters)) == 1 else letters


@gc_paused()
def evaluate(candidate: Candidate, job: Job, hardware: Hardware, constants: Constants = CALIBRATED) -> Evaluation:
    """Predict one candidate; of very many microbatches only some are simulated: see `extended`.

    Raises UserError where the job cannot run it.
    """
    layers = candidate.plan.layers or ()
    if 0 in layers and candidate.method != REDISTRIBUTED:
        raise UserError(_too_few_layers(job, len(layers)))
    sample = sampled(job)
    simulator = make_simulator(sample, candidate.plan, hardware, constants)
    prediction = predict(sample, candidate.plan, hardware, constants, simulator=simulator)
    return evaluation_of(candidate, prediction, simulator, job)


def evaluation_of(candidate: Candidate, prediction: Prediction, simulator: Simulator, job: Job) -> Evaluation:
    """The figures of a prediction for a sample of `job`, which is simulated once more with free communication."""
    timeline = prediction.timeline
    assert isinstance(timeline.costs, StageCosts)
    silent = extended(simulator.simulate(replace(timeline.costs, messages={}, collectives={})), job.microbatches)
    makespan = extended(timeline, job.microbatches)
    busy = tuple(each * job.microbatches / prediction.job.microbatches for each in timeline.busy)
    mean, most, step = sum(busy) / len(busy), max(busy), prediction.iteration_seconds - timeline.makespan
    whole = replace(prediction, job=job, iteration_seconds=makespan + step)
    return Evaluation(
        candidate=candidate,
        iteration_seconds=whole.iteration_seconds,
        mfu=whole.mfu,
        tokens_per_second=whole.tokens_per_second,
        bubble_fraction=1 - mean / makespan,
        busy=busy,
        memory=prediction.memory,
        loss=Loss(
            work=mean,
            imbalance=most - mean,
            bubble=max(0.0, silent - most),
            communication=makespan - max(silent, most),
            step=step,
        ),
        vocab_rows=candidate.plan.rows_by_rank(job),
    )


def plan(
    job: Job,
    hardware: Hardware,
    constants: Constants = CALIBRATED,
    chunks: int = 2,
    progress: Callable[[int, int], None] = lambda done, of: None,
    limit: float | None = None,
) -> tuple[list[Evaluation], list[Infeasible]]:
    """All candidates, the fastest first, and those that the job cannot run.

    Even shards are joined by balanced ones wherever these are worth it, see `balance.balanced`; `limit`: bytes per rank
    that those may take.
    Predicted in processes, one per core. `chunks` are those of `interleaved`; `progress` hears how many of how many
    candidates are done, a balanced one counted with the even one. Raises UserError as `candidates` does.
    """
    tried = candidates(job, hardware, constants, chunks)
    done = 0
    evaluations: list[Evaluation] = []
    infeasible: list[Infeasible] = []
    # Candidates with the same order of passes go to one process, which generates it once.
    shared: dict[tuple, list[Candidate]] = defaultdict(list)
    for candidate in tried:
        shared[candidate.plan.schedule, candidate.plan.vocab].append(candidate)
    with worker_pool(min(len(shared), len(os.sched_getaffinity(0)))) as pool:
        running = {
            pool.submit(_evaluate_all, group, job, hardware, constants, limit): group for group in shared.values()
        }
        for future in as_completed(running):
            for found in future.result():
                if isinstance(found, Evaluation):
                    evaluations.append(found)
                else:
                    infeasible.append(found)
            done += len(running[future])
            progress(done, len(tried))
    if not evaluations:
        raise UserError(f"no schedule can run this job: {infeasible[0].reason}")
    return sorted(evaluations, key=lambda each: each.iteration_seconds), infeasible


def _evaluate_all(
    group: Sequence[Candidate], job: Job, hardware: Hardware, constants: Constants, limit: float | None
) -> list[Evaluation | Infeasible]:
    """The candidates of a group, and behind each whose rows can be assigned the balanced one if it is another."""
    found: list[Evaluation | Infeasible] = []
    for candidate in group:
        try:
            found.append(evaluate(candidate, job, hardware, constants))
            plan = candidate.plan
            if plan.vocab.is_sharded and job.pipeline <= MOST_BALANCED:
                assigned = balanced(job, plan, hardware, constants, limit).plan(plan)
                if assigned.vocab_rows is not None:
                    found.append(evaluate(Candidate(candidate.method, assigned), job, hardware, constants))
        except UserError as error:
            found.append(Infeasible(candidate, str(error)))
    return found


WITHOUT_SPLIT = (PLAIN, REDISTRIBUTED)
"""Methods without vocabulary parallelism: what Megatron's own layers can do."""

_BY_SIMPLICITY = (PLAIN, REDISTRIBUTED, VocabMethod.VOCAB_2, VocabMethod.VOCAB_1, VocabMethod.INTERLACED)


@dataclass(frozen=True)
class Choice:
    """What is recommended: `chosen`, one of `tied`, and what it is compared with."""

    chosen: Evaluation
    tied: tuple[Evaluation, ...]
    """All that count as fast as the fastest, which is the first of them."""
    without_split: Evaluation | None
    """The fastest run without vocabulary parallelism that fits, redistributed layers included."""

    @property
    def gain(self) -> float | None:
        """How many times as fast as `without_split` the chosen run is."""
        if self.without_split is None:
            return None
        return self.without_split.iteration_seconds / self.chosen.iteration_seconds


def choose(evaluations: Sequence[Evaluation], limit: float, band: float = ERROR_BAND["time"]) -> Choice:
    """What to run, of evaluations with the fastest first.

    Candidates that fit and are slower than the fastest by no more than `band` are a tie: see `ties.tie_of`. A tie goes
    to runs that fit by more than the stated error of memory, then to the simplest, see `simplicity`. Interlaced runs
    are a comparison and are never chosen.
    Raises UserError where nothing fits.
    """
    offered = [each for each in evaluations if each.candidate.plan.vocab is not VocabMethod.INTERLACED]
    fitting = [each for each in offered if each.fits(limit)]
    if fitting:
        tied = tuple(each for each in fitting if each.iteration_seconds <= (1 + band) * fitting[0].iteration_seconds)
        without_split = next((each for each in fitting if each.candidate.method in WITHOUT_SPLIT), None)
        return Choice(min(tied, key=lambda each: (each.is_tight(limit), *simplicity(each))), tied, without_split)
    if not offered:
        raise UserError("no schedule is left that can run this job")
    least = min(offered, key=lambda each: each.peak_memory)
    plan = least.candidate.plan
    raise UserError(
        f"nothing fits {limit / 2**30:.4g} GiB: the least is {least.peak_memory / 2**30:.1f} GiB with {plan.schedule}, "
        f"{least.candidate.method}; use more pipeline or tensor ranks, recomputation, or larger GPUs"
    )


def simplicity(evaluation: Evaluation) -> tuple[float, ...]:
    """What decides a tie, the least first: Megatron's own schedules; backwards that are not split; fewer chunks; plain
    layers before redistributed ones, vocab-2 and vocab-1; balanced shards, where a plan has them, because training
    takes those by default; less memory.
    """
    plan = evaluation.candidate.plan
    chosen = family(plan.schedule)
    own = chosen.in_megatron and plan.vocab is VocabMethod.NONE
    return (
        not own,
        chosen.splits_backward,
        plan.chunks or chosen.chunks or 1,
        _BY_SIMPLICITY.index(evaluation.candidate.method),
        plan.vocab.is_sharded and plan.vocab_rows is None,
        evaluation.peak_memory,
    )


def _too_few_layers(job: Job, stages: int) -> str:
    return f"{job.model.layers} layers cannot fill {stages} virtual stages; use fewer pipeline ranks or chunks"
