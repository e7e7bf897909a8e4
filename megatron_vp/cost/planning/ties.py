"""Decides by how much the predicted times of two runs of a job must differ before one run counts as faster."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.cost.hardware.constants import ERROR_BAND, compared, compared_elsewhere
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.shapes import Job


@dataclass(frozen=True)
class Tie:
    """Runs that take at most the fraction `share` longer than the fastest run tie with it; `basis` says where `share`
    comes from.
    """

    share: float
    basis: str

    @property
    def text(self) -> str:
        """The tie in words."""
        return f"{100 * self.share:.0f} % ({self.basis})"


def tie_of(job: Job, hardware: Hardware) -> Tie:
    """The tie for `job`: the mean prediction error on published runs of its kind, but at least the error on the paper's
    setups.

    The predicted times of two runs of one job share most of their error, so the ratio of the two times is more accurate
    than either time. In the paper's tables, the predicted ratio is off by 0.7 percent on average and 2.8 percent at
    worst. For the few other jobs that were published in two layouts, the predicted ratio is off by as much as the mean
    error of their kind (docs/evidence/public_runs.md), so the tie is this mean error.
    """
    least = ERROR_BAND["time"]
    experts, pattern = job.model.experts > 0, job.model.is_hybrid
    single = job.tensor == job.context == 1
    if hardware.name == "a100" and single and not (experts or pattern or job.fp8):
        return Tie(least, "the largest error on setups like the paper's")
    found = None if pattern else compared(hardware.name, job.fp8 is not None, experts)
    if found is None:
        found = compared_elsewhere(experts)
        basis = f"the mean error of published runs of another kind, as no run of this kind was compared: {found.kind}"
    else:
        basis = f"the mean error of {found.runs} published runs: {found.kind}"
    if found.mean / 100 <= least:
        return Tie(least, f"the largest error on setups like the paper's; {found.mean} % is {basis}")
    return Tie(found.mean / 100, basis)
