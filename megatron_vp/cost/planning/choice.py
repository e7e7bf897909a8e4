"""Chooses the run to recommend, and the runs with which it is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_vp.cost.hardware.constants import ERROR_BAND, compared, compared_elsewhere
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.cost.planning.candidates import PLAIN, REDISTRIBUTED
from megatron_vp.cost.planning.predict import Prediction
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod, family

_BY_SIMPLICITY = (PLAIN, REDISTRIBUTED, VocabMethod.VOCAB_2, VocabMethod.VOCAB_1, VocabMethod.INTERLACED)


def tie_band(job: Job, hardware: Hardware) -> float:
    """By how much a run of `job` may be slower than the fastest run and still tie with it.

    Predicted times of two runs of one job share most of their error, so their ratio is more accurate than either time.
    In the paper's tables, the ratio is off by at most 2.8 percent. For any other job, the ratio is assumed to be off by
    at most the mean prediction error on published runs of the job's kind, or of another kind if no such runs are known.
    The result is at least `ERROR_BAND["time"]`, the largest error of predicted times on A100s in fp16.
    """
    experts, pattern = job.model.experts > 0, job.model.is_hybrid
    if hardware.name == "a100" and job.tensor == job.context == 1 and not (experts or pattern or job.fp8):
        return ERROR_BAND["time"]
    found = None if pattern else compared(hardware.name, job.fp8 is not None, experts)
    return max(ERROR_BAND["time"], (found or compared_elsewhere(experts)).mean / 100)


@dataclass(frozen=True)
class Choice:
    """The recommended run (`chosen`, one of `tied`), and the runs with which it is compared.

    tied: the fastest run that fits, followed by the runs that take at most 1 + `band` times as long.
    without_split: the fastest run without vocabulary parallelism that fits.
    in_megatron: the fastest run that Megatron itself supports and that fits.
    """

    chosen: Prediction
    tied: Sequence[Prediction]
    without_split: Prediction | None
    in_megatron: Prediction | None
    band: float = ERROR_BAND["time"]

    def gain_over(self, other: Prediction | None) -> float | None:
        """Speed-up of the chosen run over another run; None without another run."""
        return None if other is None else other.iteration_seconds / self.chosen.iteration_seconds


def simplicity(evaluation: Prediction) -> tuple[float, ...]:
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


def choose(
    evaluations: Sequence[Prediction],
    limit: float,
    band: float = ERROR_BAND["time"],
    key: Callable[[Prediction], tuple[float, ...]] = simplicity,
    slowest: float = float("inf"),
) -> Choice:
    """Choose one run of `evaluations`, which must be sorted with the fastest first.

    Runs tie if they fit and take at most (1 + `band`) times as long as the fastest run that fits (see `tie_band`), and
    at most `slowest` seconds. The choice is the simplest tied run (by `key`) whose free memory exceeds the error of
    predicted memory (see `Prediction.is_tight`) or, if there is none, the simplest of all tied runs. Interlaced runs
    serve only as a comparison and are never chosen. Raises UserError if nothing fits.
    """
    offered = [each for each in evaluations if each.candidate.plan.vocab is not VocabMethod.INTERLACED]
    fitting = [each for each in offered if each.fits(limit)]
    if not fitting:
        least = min(offered, key=lambda each: each.peak_memory, default=None)
        smallest = least and f"the smallest, {least.candidate.name}, needs {least.peak_memory / 2**30:.1f} GiB; "
        raise UserError(
            f"no plan fits into {limit / 2**30:.4g} GiB per rank: {smallest or ''}use more pipeline or tensor ranks, "
            "recomputation, or larger GPUs"
        )
    slowest = min(slowest, (1 + band) * fitting[0].iteration_seconds)
    tied = tuple(each for each in fitting if each.iteration_seconds <= slowest)
    chosen = min(tied, key=lambda each: (each.is_tight(limit), *key(each)))
    plain = (each for each in fitting if each.candidate.without_split)
    own = (each for each in fitting if each.candidate.in_megatron)
    return Choice(chosen, tied, next(plain, None), next(own, None), band)
