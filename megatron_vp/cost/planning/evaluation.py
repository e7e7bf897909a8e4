"""Evaluates one candidate for a job: its time, how the time is spent, and its memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.cost.planning.candidates import REDISTRIBUTED, Candidate, too_few_layers
from megatron_vp.cost.planning.copies import RankCopies, copies_of
from megatron_vp.cost.planning.predict import Prediction, make_simulator, predict
from megatron_vp.cost.planning.samples import extended, sampled
from megatron_vp.cost.ranks.rank_memory import RankMemory
from megatron_vp.errors import UserError
from megatron_vp.schedule import Simulator, StageCosts
from megatron_vp.schedule.gc_paused import gc_paused

SMALL = 0.05
"""A bottleneck is named only if it takes at least this fraction of the iteration time."""


@dataclass(frozen=True)
class Loss:
    """How an iteration's time is spent, in seconds; the parts add up to the iteration time.

    work: mean work of the ranks.
    imbalance: excess of the busiest rank's work over the mean.
    bubble: time that the busiest rank would wait if communication were free.
    communication: time that communication adds.
    step: time after the passes, for gradient synchronisation and the optimizer.
    copies: time that copies of offloaded activations add. It includes the time for which the busiest lane of copies is
        longer than the work of the busiest rank.
    """

    work: float
    imbalance: float
    bubble: float
    communication: float
    step: float
    copies: float = 0.0

    def largest(self) -> str:
        """Name of the largest part other than the work, or `compute` if all parts other than the work are small."""
        names = ("imbalance", "bubble", "communication", "step", "copies")
        name = max(names, key=lambda each: getattr(self, each))
        total = self.work + sum(getattr(self, each) for each in names)
        return name if getattr(self, name) >= SMALL * total else "compute"


@dataclass(frozen=True)
class Evaluation:
    """One candidate's prediction in seconds and bytes; `busy` and `memory` have one entry per pipeline rank."""

    candidate: Candidate
    iteration_seconds: float
    mfu: float
    tokens_per_second: float
    bubble_fraction: float
    busy: tuple[float, ...]
    memory: tuple[RankMemory, ...]
    loss: Loss
    vocab_rows: tuple[int, ...] | None = None
    """Vocabulary rows of every pipeline rank, summed over its tensor ranks; None if the vocabulary is not split."""
    copies: tuple[RankCopies, ...] = ()
    """Copies between device and host, by pipeline rank; empty without offloading."""
    variant: int = 0
    """In a search, the index of the run's parallel sizes in `Search.tried`."""
    given: bool = False
    """Whether this is the job as its configuration describes it."""

    @property
    def peak_memory(self) -> float:
        """Bytes that the fullest rank needs."""
        return max(rank.total for rank in self.memory)

    def fits(self, limit: float) -> bool:
        """Whether every rank stays within `limit` bytes."""
        return self.peak_memory <= limit

    def is_tight(self, limit: float) -> bool:
        """Whether peak memory would exceed `limit` bytes if the prediction were too low by the largest known error."""
        return (1 + ERROR_BAND["memory"]) * self.peak_memory > limit

    def bound_by(self, limit: float) -> str:
        """The candidate's bottleneck, in one or two words."""
        if not self.fits(limit):
            return "memory"
        largest = self.loss.largest()
        if largest == "imbalance":
            return f"rank {self.busy.index(max(self.busy))}"
        return largest

    def document(self, limit: float) -> dict[str, Any]:
        """The evaluation as a JSON document."""
        plan = self.candidate.plan
        return {
            "schedule": plan.schedule,
            "activation_limit": plan.activation_limit or None,
            "method": self.candidate.method,
            "chunks": plan.chunks,
            "layers": plan.layers,
            "vocab_rows": self.vocab_rows,
            "offload_chunks": plan.offload_chunks,
            "iteration_seconds": self.iteration_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "seconds": {name: value for name, value in asdict(self.loss).items() if name != "copies" or self.copies},
            "busy_seconds": self.busy,
            "peak_memory_bytes": self.peak_memory,
            "memory_bytes": [rank.parts() for rank in self.memory],
            "outside_bytes": [rank.outside.parts() for rank in self.memory],
            "communicators": [rank.outside.communicators for rank in self.memory],
            "fits": self.fits(limit),
            "free_bytes": limit - self.peak_memory,
            "tight": self.is_tight(limit),
            "bound_by": self.bound_by(limit),
        } | ({"copies": list(map(asdict, self.copies))} if self.copies else {})


@gc_paused()
def evaluate(candidate: Candidate, job: Job, hardware: Hardware) -> Evaluation:
    """Predict one candidate. Raises UserError if the job cannot run the candidate.

    If there are very many microbatches, only some of them are simulated; see `samples`.
    """
    layers = candidate.plan.layers or ()
    if 0 in layers and candidate.method != REDISTRIBUTED:
        raise UserError(too_few_layers(job, len(layers)))
    sample = sampled(job)
    simulator = make_simulator(sample, candidate.plan, hardware)
    prediction = predict(sample, candidate.plan, hardware, simulator=simulator)
    return evaluation_of(candidate, prediction, simulator, job)


def evaluation_of(candidate: Candidate, prediction: Prediction, simulator: Simulator, job: Job) -> Evaluation:
    """Evaluate `candidate` for all microbatches of `job`. `prediction` may cover only some of the microbatches."""
    timeline = prediction.timeline
    assert isinstance(timeline.costs, StageCosts)
    quiet = replace(timeline.costs, messages={}, collectives={})
    silent = extended(simulator.simulate(quiet), job.microbatches)
    moves = bool(timeline.costs.copies)
    uncopied = extended(simulator.simulate(replace(quiet, copies={})), job.microbatches) if moves else silent
    makespan = extended(timeline, job.microbatches)
    busy = tuple(each * job.microbatches / prediction.job.microbatches for each in timeline.busy)
    copies = copies_of(prediction) if moves else ()
    lane = max((each.load * own for each, own in zip(copies, busy, strict=False)), default=0.0)
    mean, most, step = sum(busy) / len(busy), max(busy), prediction.iteration_seconds - timeline.makespan
    bubble = max(0.0, uncopied - max(most, lane))
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
            bubble=bubble,
            communication=max(0.0, makespan - max(silent, most)),
            step=step,
            copies=max(silent, most) - most - bubble,
        ),
        vocab_rows=candidate.plan.rows_by_rank(job),
        copies=copies,
    )
