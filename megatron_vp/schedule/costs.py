"""How long each kind of pass takes, in any one unit of time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from megatron_vp.errors import UserError
from megatron_vp.schedule.passes import PassKind


@dataclass(frozen=True)
class PassCosts:
    """Durations. F, B (input gradient), W (weight gradient) are those of a whole rank, all its chunks together;
    `comm` is the latency of every message and collective. Raises UserError for a negative or non-finite duration.
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    S: float = 0.25
    T: float = 0.25
    IF: float = 0.05
    IB: float = 0.05
    comm: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"cost {field.name}={value} is not a duration; give a finite number of at least 0")

    @classmethod
    def parse(cls, text: str) -> PassCosts:
        """Read `F=1,B=1,S=0.25`; what is not named keeps its default. Raises UserError."""
        known = {field.name for field in fields(cls)}
        given: dict[str, float] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, separator, value = (part.strip() for part in item.partition("="))
            if not separator or name not in known or name in given:
                raise UserError(
                    f"cost {item!r} is not NAME=NUMBER with NAME one of {', '.join(sorted(known))}, each at most once"
                )
            try:
                given[name] = float(value)
            except ValueError:
                raise UserError(f"cost {item!r}: {value!r} is not a number") from None
        return cls(**given)

    def duration(self, kind: PassKind, chunks: int, split_backward: bool) -> float:
        """Duration of one pass of one chunk; an unsplit B takes B + W, a V what S, T, IF and IB take."""
        match kind:
            case PassKind.F:
                return self.F / chunks
            case PassKind.B:
                return (self.B if split_backward else self.B + self.W) / chunks
            case PassKind.W:
                return self.W / chunks
            case PassKind.V:
                return self.S + self.T + self.IF + self.IB
        return getattr(self, kind)

    def without_zeros(self) -> PassCosts:
        """The same with at least a thousandth of the whole for F, B and W: what nominal times are built from."""
        floor = 1e-3 * (self.F + self.B + self.W) or 1.0
        return replace(self, F=max(self.F, floor), B=max(self.B, floor), W=max(self.W, floor))
