"""Fits flexible schedules to the available memory.

The bases of a flexible schedule are fixed schedules, each with its own memory need. Fitting a flexible schedule is
worthwhile only if its largest base, which needs the most memory, does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from megatron_vp.cost.balance.balanced import balanced
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.candidates import MOST_BALANCED, Candidate, candidates
from megatron_vp.cost.planning.evaluation import Evaluation, evaluate
from megatron_vp.cost.planning.offloading import MOST_LOAD, copy_load
from megatron_vp.cost.prediction.limit import with_limit
from megatron_vp.cost.prediction.stage_costs import order_costs
from megatron_vp.cost.sizes.shapes import Job, Plan
from megatron_vp.errors import UserError
from megatron_vp.schedule import FAMILIES, family
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.ledger import peak
from megatron_vp.schedule.pass_kinds import Held

STEPS = 3
"""Number of memory limits to try. The first is only an estimate, and each further one is lower by one chunk's
activations.
"""

FITTED_PER_RANK = 3
"""When `plan` searches for a flexible schedule's shape, it uses at most this many microbatches per pipeline rank. A
training job searches with all its microbatches and may find a different shape.
"""


def flexible_candidates(job: Job, hardware: Hardware, offload: bool = False) -> list[Candidate]:
    """Candidates for `fitted_evaluation`: each flexible schedule with each vocabulary method.

    Each candidate has the same layers per stage as the candidate for the base of its schedule that needs the most
    memory. With `offload`, each candidate is also tried with the activations of one chunk per rank in host memory, if
    the candidate's passes can hide the copies. The list is empty for more than MOST_BALANCED ranks, because the search
    for a shape would take too long.
    """
    if not 2 <= job.pipeline <= MOST_BALANCED:
        return []
    tried, found = candidates(job, hardware), []
    for record in FAMILIES.values():
        # The dict keeps only the last candidate for each `vocab`. For NONE, REDISTRIBUTED candidates come after the
        # PLAIN one.
        fullest = [each for each in tried if record.bases and each.plan.schedule == record.bases[0].name]
        for each in {each.plan.vocab: each for each in fullest}.values():
            found.append(replace(each, plan=replace(each.plan, schedule=record.name)))
            if offload and copy_load(job, each.plan, 1, hardware) <= MOST_LOAD:
                found.append(replace(found[-1], plan=replace(found[-1].plan, offload_chunks=1)))
    return found


def fitted_evaluations(
    pool: Executor,
    jobs: Sequence[Job],
    hardware: Hardware,
    limit: float | None,
    offload: bool = False,
) -> list[list[Evaluation]]:
    """Evaluate each job's `flexible_candidates` within `limit` bytes per rank; without a limit, evaluate none."""
    if limit is None:
        return [[] for _ in jobs]
    running = [
        [
            pool.submit(fitted_evaluation, candidate, job, hardware, limit)
            for candidate in flexible_candidates(job, hardware, offload)
        ]
        for job in jobs
    ]
    return [[found for future in futures if (found := future.result()) is not None] for futures in running]


def fitted_evaluation(candidate: Candidate, job: Job, hardware: Hardware, limit: float) -> Evaluation | None:
    """Fit the candidate's flexible schedule to `limit` bytes per rank, and evaluate it.

    Returns None if the largest base fits, if none of the schedules tried fits, or if a base that fits is at least as
    fast as the fitted schedule.
    """
    record = family(candidate.plan.schedule)
    try:
        plans = [replace(candidate.plan, schedule=base.name) for base in record.bases]
        bases = [_balanced(replace(candidate, plan=plan), job, hardware, limit) for plan in plans]
        sample = _sample(job)
        for microbatches in _limits(record, bases, job, hardware, limit):
            plan = replace(bases[0].candidate.plan, schedule=record.name)
            plan = with_limit(sample, plan, hardware, f"{microbatches:g}")
            found = _balanced(replace(candidate, plan=plan), job, hardware, limit)
            if found.fits(limit):
                rivals = [each.iteration_seconds for each in bases if each.fits(limit)]
                return found if found.iteration_seconds < min(rivals, default=math.inf) else None
    except UserError:  # One of the bases cannot run the job, or no block of the flexible schedule fits.
        pass
    return None


def _balanced(candidate: Candidate, job: Job, hardware: Hardware, limit: float) -> Evaluation:
    """Evaluate a candidate with the distribution of layers and vocabulary rows that training would use."""
    plan = candidate.plan
    if plan.vocab.is_sharded:
        plan = balanced(job, plan, hardware, limit).plan(plan)
    return evaluate(replace(candidate, plan=plan), job, hardware)


def _limits(record: Family, bases: list[Evaluation], job: Job, hardware: Hardware, limit: float) -> list[float]:
    """Activation limits to try, in microbatches per rank, largest first. The largest would just fit if memory were
    linear in the activation limit.
    """
    fullest, least = bases[0], bases[-1]
    more = fullest.peak_memory - least.peak_memory
    if fullest.fits(limit) or more <= 0:
        return []
    chunks, ranks = record.chunks_of(None), range(job.pipeline)
    most, few = (
        max(
            base.promised_peak(job.pipeline, rank, chunks, job.microbatches, fullest.candidate.plan.vocab)
            for rank in ranks
        )
        for base in (record.bases[0], record.bases[-1])
    )
    if fullest.candidate.plan.offload_chunks:
        most, few = (_held(each.candidate.plan, job, hardware) for each in (fullest, least))
    first = math.floor(few + (limit - least.peak_memory) / more * (most - few))
    return [count / chunks for count in range(first, max(0, first - STEPS), -1)]


def _held(plan: Plan, job: Job, hardware: Hardware) -> int:
    """Largest number of (chunk, microbatch) pairs whose activations are in one device's memory at once."""
    sample = _sample(job)
    placed = plan.request(sample, costs=order_costs(sample, plan, hardware)).placed().schedule
    return max(peak(order, Held.ACTIVATIONS) for order in placed.ranks)


def _sample(job: Job) -> Job:
    return replace(job, microbatches=min(job.microbatches, FITTED_PER_RANK * job.pipeline))
