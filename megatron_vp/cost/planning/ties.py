"""Decides how far apart two predictions of one job must be before one run counts as faster, from published errors."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.cost.hardware.constants import ERROR_BAND, compared, compared_elsewhere
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.shapes import Job


@dataclass(frozen=True)
class Tie:
    """Runs within `share` of the fastest tie; `basis` gives the reason for this width."""

    share: float
    basis: str

    @property
    def text(self) -> str:
        """The tie in words."""
        return f"{100 * self.share:.0f} % ({self.basis})"


def tie_of(job: Job, hardware: Hardware) -> Tie:
    """The tie's width for `job`: the mean error of published runs of its kind, at least that of the paper's setups.

    Runs of one job share most of their error, so their ratio is better known than either. In the paper's tables it is
    0.7 percent off on average and 2.8 at worst. Published pairs of one job in two layouts are too few for a figure of
    their own; theirs is as large as the mean error of their kind (docs/evidence/public_runs.md), so that is taken.
    """
    least = ERROR_BAND["time"]
    experts, pattern = job.model.experts > 0, job.model.is_hybrid
    single = job.tensor == job.context == 1
    if hardware.name == "a100" and single and not (experts or pattern or job.fp8):
        return Tie(least, "the largest error on setups like the paper's")
    found = None if pattern else compared(hardware.name, job.fp8 is not None, experts)
    if found is None:
        found = compared_elsewhere(experts)
        basis = f"no published run of this kind was compared; the mean error of {found.kind}"
    else:
        basis = f"the mean error of {found.runs} published runs: {found.kind}"
    if found.mean / 100 <= least:
        return Tie(least, f"the largest error on setups like the paper's; {found.mean} % is {basis}")
    return Tie(found.mean / 100, basis)
