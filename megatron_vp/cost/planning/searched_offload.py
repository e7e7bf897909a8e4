"""Chooses the parallel sizes and the runs for which a search also tries to offload activations to host memory."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_vp.cost.hardware.constants import CALIBRATED, Constants
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.candidates import Candidate, candidates
from megatron_vp.cost.planning.evaluation import Evaluation, evaluate
from megatron_vp.cost.planning.offloading import MOST_LOAD, WITH_OFFLOAD, copy_load, offloaded_evaluations
from megatron_vp.cost.prediction.bounds import Bound, bound
from megatron_vp.cost.sizes.shapes import Job
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod

SIZES = 4
"""Besides the job's own parallel sizes, a search tries offloading with at most this many other combinations of sizes.
Each combination takes up to about 50 simulations.
"""


def sizes_to_offload(least: Iterable[tuple[Bound, int]]) -> list[int]:
    """Find the variants with runs on the Pareto frontier of the time and memory bounds in `least`, fastest first. If
    there are more than SIZES, return only SIZES of them, spread over the frontier.

    least: for each run, its lower bounds without the memory of activations, and the index of its variant.
    """
    kept: list[tuple[Bound, int]] = []
    for each in sorted(least):
        if not kept or each[0].memory < kept[-1][0].memory:
            kept.append(each)
    found = list(dict.fromkeys(variant for _, variant in kept))
    last = len(found) - 1
    return found if last < SIZES else [found[round(place * last / (SIZES - 1))] for place in range(SIZES)]


def bases_to_offload(job: Job, hardware: Hardware, constants: Constants, chunks: int) -> list[Candidate]:
    """For each schedule whose passes can hide one chunk's copies, return the candidate with the lowest time bound."""
    best: dict[str, tuple[Bound, int, Candidate]] = {}
    for place, each in enumerate(candidates(job, hardware, constants, chunks, WITH_OFFLOAD)):
        try:
            found = bound(each.plan, job, hardware, constants), place, each
            hidden = copy_load(job, each.plan, 1, hardware, constants) <= MOST_LOAD
        except UserError:
            continue
        if hidden and each.plan.vocab is not VocabMethod.INTERLACED:
            best[each.plan.schedule] = min(found, best.get(each.plan.schedule, found))
    return [candidate for _, _, candidate in best.values()]


def offloaded_runs(
    base: Candidate, job: Job, hardware: Hardware, limit: float, constants: Constants = CALIBRATED
) -> list[Evaluation]:
    """Evaluate `base` without offloading, and with the numbers of offloaded chunks that `offloaded_evaluations`
    chooses. The list is empty if the job cannot run under the plan of `base`.
    """
    try:
        found = evaluate(base, job, hardware, constants)
        return [found, *offloaded_evaluations(found, job, hardware, limit, constants)]
    except UserError:
        return []
