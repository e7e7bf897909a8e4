"""Finds the best schedule and vocabulary method for a job by predicting all candidates."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass

from megatron_vp.cost.balance.balanced import balanced
from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.candidates import MOST_BALANCED, PLAIN, REDISTRIBUTED, Candidate, candidates
from megatron_vp.cost.planning.evaluation import Evaluation, evaluate
from megatron_vp.cost.planning.flexible import fitted_evaluations
from megatron_vp.cost.planning.offloading import WITH_OFFLOAD, bases_of, offloaded_evaluations
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.cost.sizes.shapes import Job
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod, family


@dataclass(frozen=True)
class Infeasible:
    """A candidate that the job cannot run, and the reason."""

    candidate: Candidate
    reason: str


def plan(
    job: Job,
    hardware: Hardware,
    chunks: int = 2,
    progress: Callable[[int, int], None] = lambda done, of: None,
    limit: float | None = None,
    offload: bool = False,
) -> tuple[list[Evaluation], list[Infeasible]]:
    """Evaluate all candidates; return those that the job can run, fastest first, and those that it cannot run.

    Args:
        chunks: chunks per rank in schedules that allow any number, such as `interleaved`.
        progress: called with the number of finished candidates and the total; a candidate and its balanced version
            count as one.
        limit: bytes per rank within which shards are balanced and flexible schedules are fitted (see `flexible`).
        offload: whether to try every schedule of WITH_OFFLOAD, first without and then with activations in host memory.

    If `balance.balanced` chooses uneven shards for a candidate, the candidate is also evaluated with these shards.
    Raises UserError if `candidates` does, or if the job cannot run any candidate.
    """
    tried = candidates(job, hardware, chunks, WITH_OFFLOAD if offload else None)
    done = 0
    evaluations: list[Evaluation] = []
    infeasible: list[Infeasible] = []
    # Candidates with the same order of passes go to one process, which generates that order once.
    shared: dict[tuple, list[Candidate]] = defaultdict(list)
    for candidate in tried:
        shared[candidate.plan.schedule, candidate.plan.vocab].append(candidate)
    with worker_pool(min(len(shared), len(os.sched_getaffinity(0)))) as pool:
        running = {pool.submit(_evaluate_all, group, job, hardware, limit): group for group in shared.values()}
        for future in as_completed(running):
            found, impossible = future.result()
            evaluations += found
            infeasible += impossible
            done += len(running[future])
            progress(done, len(tried))
        fitted = fitted_evaluations(pool, [job], hardware, limit, offload)[0]
        if offload:
            evaluations += _offloaded(pool, evaluations, job, hardware, limit, progress)
        evaluations += fitted
    if not evaluations:
        raise UserError(f"no schedule can run this job: {infeasible[0].reason}")
    return sorted(evaluations, key=lambda each: each.iteration_seconds), infeasible


def _offloaded(
    pool: Executor,
    evaluations: Sequence[Evaluation],
    job: Job,
    hardware: Hardware,
    limit: float | None,
    progress: Callable[[int, int], None],
) -> list[Evaluation]:
    """Evaluate the fastest run of each schedule and method again, with activations offloaded to host memory."""
    running = [pool.submit(offloaded_evaluations, base, job, hardware, limit) for base in bases_of(evaluations)]
    for done, _ in enumerate(as_completed(running)):
        progress(done + 1, len(running))
    return [each for future in running for each in future.result()]


def _evaluate_all(
    group: Sequence[Candidate], job: Job, hardware: Hardware, limit: float | None
) -> tuple[list[Evaluation], list[Infeasible]]:
    """Evaluate candidates. If `balanced` chooses uneven shards for a candidate, evaluate it with these too."""
    found, infeasible = list[Evaluation](), list[Infeasible]()
    for candidate in group:
        try:
            found.append(evaluate(candidate, job, hardware))
            plan = candidate.plan
            if plan.vocab.is_sharded and job.pipeline <= MOST_BALANCED:
                assigned = balanced(job, plan, hardware, limit).plan(plan)
                if assigned.vocab_rows is not None:
                    found.append(evaluate(Candidate(candidate.method, assigned), job, hardware))
        except UserError as error:
            infeasible.append(Infeasible(candidate, str(error)))
    return found, infeasible


_BY_SIMPLICITY = (PLAIN, REDISTRIBUTED, VocabMethod.VOCAB_2, VocabMethod.VOCAB_1, VocabMethod.INTERLACED)


@dataclass(frozen=True)
class Choice:
    """The recommended run (`chosen`, one of `tied`), and the runs with which it is compared."""

    chosen: Evaluation
    tied: Sequence[Evaluation]
    """The fastest run that fits, followed by the runs that tie with it."""
    without_split: Evaluation | None
    """The fastest run without vocabulary parallelism that fits."""
    in_megatron: Evaluation | None
    """The fastest run that Megatron itself supports and that fits."""

    @property
    def gain(self) -> float | None:
        """Speed-up of the chosen run over `without_split`."""
        return gain_over(self.without_split, self.chosen)

    @property
    def gain_over_megatron(self) -> float | None:
        """Speed-up of the chosen run over `in_megatron`."""
        return gain_over(self.in_megatron, self.chosen)


def gain_over(other: Evaluation | None, chosen: Evaluation) -> float | None:
    """Speed-up of `chosen` over another run; None if there is no other run."""
    return None if other is None else other.iteration_seconds / chosen.iteration_seconds


def choose(evaluations: Sequence[Evaluation], limit: float, band: float = ERROR_BAND["time"]) -> Choice:
    """Choose one run of `evaluations`, which must be sorted with the fastest first.

    Runs tie if they fit and take at most (1 + `band`) times as long as the fastest run that fits; see `ties.tie_of`.
    The choice is the simplest tied run (see `simplicity`) whose free memory exceeds the error of predicted memory (see
    `Evaluation.is_tight`) or, if there is none, the simplest of all tied runs. Interlaced runs serve only as a
    comparison and are never chosen. Raises UserError if nothing fits.
    """
    offered = [each for each in evaluations if each.candidate.plan.vocab is not VocabMethod.INTERLACED]
    fitting = [each for each in offered if each.fits(limit)]
    if fitting:
        tied = near_fastest(fitting, band)
        return compared(min(tied, key=lambda each: (each.is_tight(limit), *simplicity(each))), tied, fitting)
    if not offered:
        raise UserError(
            "only the schedule `interlaced` can run this job, but `plan` never recommends it, because it exists only "
            "for comparison"
        )
    least = min(offered, key=lambda each: each.peak_memory)
    plan = least.candidate.plan
    raise UserError(
        f"no plan fits into {limit / 2**30:.4g} GiB per rank: the smallest, {plan.schedule} with "
        f"{least.candidate.method}, needs {least.peak_memory / 2**30:.1f} GiB; use more pipeline or tensor ranks, "
        "recomputation, or larger GPUs"
    )


def near_fastest(fitting: Sequence[Evaluation], band: float) -> tuple[Evaluation, ...]:
    """The runs that take at most (1 + `band`) times as long as the first, which is the fastest."""
    return tuple(each for each in fitting if each.iteration_seconds <= (1 + band) * fitting[0].iteration_seconds)


def compared(
    chosen: Evaluation,
    tied: Sequence[Evaluation],
    fitting: Sequence[Evaluation],
    accepts: Callable[[Evaluation], bool] = lambda each: True,
) -> Choice:
    """Compare `chosen` with the fastest runs of `fitting` that `accepts` takes."""
    plain = [each for each in fitting if each.candidate.without_split]
    own = [each for each in plain if each.candidate.in_megatron]
    return Choice(chosen, tied, *(next(filter(accepts, each), None) for each in (plain, own)))


def simplicity(evaluation: Evaluation) -> tuple[float, ...]:
    """Sort key for tied runs (see `choose`): the lowest key wins.

    The key prefers, in this order: fewer chunks in host memory; Megatron's own schedules; backwards that are not split;
    fewer chunks; the method that comes first in `_BY_SIMPLICITY`; balanced shards, which training uses by default; less
    memory.
    """
    plan = evaluation.candidate.plan
    chosen = family(plan.schedule)
    own = chosen.in_megatron and plan.vocab is VocabMethod.NONE
    return (
        plan.offload_chunks,
        not own,
        chosen.splits_backward,
        plan.chunks or chosen.chunks or 1,
        _BY_SIMPLICITY.index(evaluation.candidate.method),
        plan.vocab.is_sharded and plan.vocab_rows is None,
        evaluation.peak_memory,
    )
