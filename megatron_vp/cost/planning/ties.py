"""Decides by how much the predicted times of two runs of a job must differ before one run counts as faster."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vp.cost.hardware.constants import ERROR_BAND, compared, compared_elsewhere
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.shapes import Job


@dataclass(frozen=True)
class Tie:
    """Runs tie with the fastest run if they take at most `1 + share` times as long. `basis` explains this `share`."""

    share: float
    basis: str

    @property
    def text(self) -> str:
        """`share` in percent, followed by `basis`."""
        return f"{100 * self.share:.0f} % ({self.basis})"


def tie_of(job: Job, hardware: Hardware) -> Tie:
    """By how much a run of `job` may be slower than the fastest run and still tie with it.

    Predicted times of two runs of one job share most of their error, so their ratio is more accurate than either time.
    In the paper's tables, the ratio is off by at most 2.8 percent. For any other job, the ratio is assumed to be off by
    at most the mean prediction error on published runs of the job's kind, or of another kind if no such runs are known.
    `Tie.share` is at least `ERROR_BAND["time"]`, the largest error of predicted times on A100s in fp16.
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
            f"the mean prediction error for published runs of another kind: {found.kind}; no published run of this "
            "job's kind was compared with a prediction"
        )
    else:
        basis = f"the mean prediction error for {found.runs} published runs of this kind: {found.kind}"
    if found.mean / 100 < least:
        return Tie(
            least, f"the largest prediction error on setups like the paper's, because this error exceeds {basis}"
        )
    return Tie(found.mean / 100, basis)
