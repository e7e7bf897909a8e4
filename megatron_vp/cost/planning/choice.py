"""Judges whether a job gains from this package, and chooses the run to recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vp.cost.planning.bounds import time_and_memory
from megatron_vp.cost.planning.predict import Prediction
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod, family

FASTER = 1.01
"""A run is called faster than its rival from this speed-up on."""

AS_FAST, SMALLER = 0.99, 0.95
"""A run is called smaller if its speed-up is at least the first number, and its memory at most the second fraction."""

TIE = 1.01
"""Runs that take at most this many times as long as the fastest run tie with it."""


@dataclass(frozen=True)
class Verdict:
    """Whether a job gains from this package.

    answer: `faster`, `smaller` or `not worth it`.
    best: the recommended run.
    rival: the fastest run that Megatron itself supports and that fits. If none fits, the one that needs least memory.
    ours: the run that is compared with the rival: `best`, if it is worth it; otherwise the fastest run that fits and
        that Megatron does not support; without such a run, the rival itself.
    """

    answer: str
    best: Prediction
    rival: Prediction | None
    ours: Prediction

    @property
    def speedup(self) -> float | None:
        """The rival's time over that of `ours`."""
        return None if self.rival is None else self.rival.iteration_seconds / self.ours.iteration_seconds

    @property
    def memory_saved(self) -> float | None:
        """Bytes that the fullest rank needs less than that of the rival."""
        return None if self.rival is None else self.rival.peak_memory - self.ours.peak_memory


def judge(runs: Sequence[Prediction], limit: float) -> Verdict:
    """Compare runs of a job that this package adds with those that Megatron itself supports, within `limit` bytes.

    If no run of Megatron fits, every other run is `smaller`. Of the runs that are worth it, the recommended one is the
    simplest that ties with the fastest (see `_simplicity`) or, if none is faster than the rival, the smallest. If none
    is worth it, the rival is recommended. Interlaced runs serve only as a comparison and are ignored. Raises UserError
    if nothing fits.
    """
    offered = sorted((each for each in runs if each.plan.vocab is not VocabMethod.INTERLACED), key=time_and_memory)
    fitting = [each for each in offered if each.fits(limit)]
    if not fitting:
        least = min(offered, key=lambda each: each.peak_memory, default=None)
        smallest = least and f"the smallest, {least.plan.name}, needs {least.peak_memory / 2**30:.1f} GiB; "
        raise UserError(
            f"no plan fits into {limit / 2**30:.4g} GiB per rank: {smallest or ''}use more pipeline or tensor ranks, "
            "recomputation, or larger GPUs"
        )
    own = [each for each in offered if each.plan.in_megatron]
    smallest_own = min(own, key=lambda each: each.peak_memory, default=None)
    rival = next((each for each in own if each.fits(limit)), smallest_own)
    ours = [each for each in fitting if not each.plan.in_megatron]
    if rival is None or not rival.fits(limit):
        best = _simplest(ours, limit)
        return Verdict("smaller", best, rival, best)
    faster = [each for each in ours if rival.iteration_seconds >= FASTER * each.iteration_seconds]
    if faster:
        best = _simplest(faster, limit)
        return Verdict("faster", best, rival, best)
    smaller = [
        each
        for each in ours
        if rival.iteration_seconds >= AS_FAST * each.iteration_seconds
        and each.peak_memory <= SMALLER * rival.peak_memory
    ]
    if smaller:
        best = min(smaller, key=lambda each: each.peak_memory)
        return Verdict("smaller", best, rival, best)
    return Verdict("not worth it", rival, rival, ours[0] if ours else rival)


def _simplest(runs: Sequence[Prediction], limit: float) -> Prediction:
    """Of the runs that tie with the first, which is the fastest: preferably one with free memory that exceeds the error
    of predicted memory (see `Prediction.is_tight`), then one whose sizes and schedule ask for less, then the smallest.
    """

    def demands(run: Prediction) -> tuple[float, ...]:
        job, plan, record = run.job, run.plan, family(run.plan.schedule)
        sizes = job.context, job.recompute != "none", job.tensor, job.expert
        chunks = plan.chunks or record.chunks or 1
        return run.is_tight(limit), *sizes, plan.offload_chunks, record.splits_backward, chunks, run.peak_memory

    return min((each for each in runs if each.iteration_seconds <= TIE * runs[0].iteration_seconds), key=demands)
