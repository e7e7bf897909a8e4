"""Decides by how much the predicted times of two runs of a job must differ before one run counts as faster."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.cost.hardware.constants import ERROR_BAND, compared, compared_elsewhere
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.shapes import Job


@dataclass(frozen=True)
class Tie:
    """Runs tie with the fastest if they are at most the fraction `share` slower; `basis` names its source."""

    share: float
    basis: str

    @property
    def text(self) -> str:
        """The tie in words."""
        return f"{100 * self.share:.0f} % ({self.basis})"


def tie_of(job: Job, hardware: Hardware) -> Tie:
    """The tie for `job`: the mean prediction error on published runs of its kind, but at least the error on the paper's
    setups.

    Predicted times of two runs of one job share most of their error, so their ratio is more accurate. In the paper's
    tables, the ratio is off by at most 2.8 percent. For other jobs, it can be off by as much as the mean prediction
    error for published runs of that kind.
    """
    least = ERROR_BAND["time"]
    experts, pattern = job.model.experts > 0, job.model.is_hybrid
    single = job.tensor == job.context == 1
    if hardware.name == "a100" and single and not (experts or pattern or job.fp8):
        return Tie(least, "the largest prediction error on setups like the paper's")
    found = None if pattern else compared(hardware.name, job.fp8 is not None, experts)
    if found is None:
        found = compared_elsewhere(experts)
        basis = (
            "the mean prediction error for published runs of another kind, as no run of this kind was compared: "
            f"{found.kind}"
        )
    else:
        basis = f"the mean prediction error for {found.runs} published runs: {found.kind}"
    if found.mean / 100 < least:
        return Tie(least, f"the largest prediction error on setups like the paper's; more than {found.mean} %, {basis}")
    return Tie(found.mean / 100, basis)
