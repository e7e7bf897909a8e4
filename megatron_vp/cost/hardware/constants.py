"""The constants of the cost model that are fitted to measured runs, and the errors of its predictions."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Constants:
    """The constants that `evidence/calibrate.py` fits to published runs.

    matrix: share of the peak FLOP/s that large matrix products reach under sustained load.
    attention_forward, attention_backward: share of the peak FLOP/s that attention kernels reach, counting only the
        FLOPs of the causal half.
    newer_attention: how many times faster attention is in the newer code base of the paper's V-Half runs (table 6).
    bandwidth: share of the memory bandwidth that streaming kernels reach.
    layer_bytes: bytes per token and hidden unit that a layer's forward moves outside its matrix products.
    score_bytes: bytes per logit that vocab-1's S and T move in total.
    gap: fixed seconds per pass, for kernel launches and the transition to the next pass.
    speed_spread: relative standard deviation of the time that ranks take for the same work.
    idle_boost: speed-up of passes on a mostly idle rank, whose clock is not throttled.
    network: share of one GPU's network bandwidth that messages and collectives between nodes reach.
    """

    matrix: float
    attention_forward: float
    attention_backward: float
    newer_attention: float
    bandwidth: float
    layer_bytes: float
    score_bytes: float
    gap: float
    speed_spread: float
    idle_boost: float
    network: float

    def with_newer_attention(self) -> Constants:
        """Return a copy with the faster attention of the paper's V-Half runs."""
        return replace(
            self,
            attention_forward=self.attention_forward * self.newer_attention,
            attention_backward=self.attention_backward * self.newer_attention,
            newer_attention=1.0,
        )


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FITTED = Constants(**_FILE["fitted"])
"""The result of `evidence/calibrate.py`, for 8 and 16 A100s, fp16, and Megatron with unfused cross entropy."""

CALIBRATED = FITTED.with_newer_attention()
"""The constants that predictions use by default."""

ERROR_BAND = {"time": 0.03, "memory": 0.03}
"""The largest relative errors for setups to which the model was not fitted, on A100s in fp16."""


class Compared(NamedTuple):
    """Mean and largest absolute error, in %, of the tokens/s predicted for published runs of one kind."""

    kind: str
    runs: int
    mean: int
    worst: int


_COMPARED = {kind: Compared(*figures) for kind, figures in _FILE["compared"].items()}


def compared(hardware: str, fp8: bool, experts: bool) -> Compared | None:
    """The comparison for one kind of job; None if no published run of this kind states enough of its configuration."""
    return _COMPARED.get(f"{hardware} {'moe' if experts else 'dense'}{' fp8' if fp8 else ''}")
