"""Durations of passes and transfers, in any unit of time. In `PassCosts`, durations are equal on all ranks and stages.
In `StageCosts`, they may differ by stage, rank and link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule.passes import Pass, PassKind, Schedule
from megatron_vp.schedule.transfers import Channel, CollectiveKind, Copy, Operation


@dataclass(frozen=True)
class PassCosts:
    """Durations that are equal on all ranks and stages.

    F, B (input gradient) and W (weight gradient) are durations for one microbatch in all chunks of a rank together.
    `comm` is the duration of every message and every collective. `other` has the durations of additional kinds of pass
    by name; a kind without an entry takes no time. Raises UserError for a negative or non-finite duration, or one above
    `LONGEST`.
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    S: float = 0.25
    T: float = 0.25
    IF: float = 0.05
    IB: float = 0.05
    comm: float = 0.0
    other: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in self.named().items():
            _check(name, value)

    def named(self) -> dict[str, float]:
        """All durations by name."""
        return {name: getattr(self, name) for name in _OWN} | dict(self.other)

    @classmethod
    def parse(cls, text: str) -> PassCosts:
        """Parse text such as `F=1,B=1,S=0.25`; durations that are not named keep their defaults. Raises UserError."""
        known = {*_OWN, *(kind.value for kind in PassKind if kind not in _NOT_NAMED), "copy"}
        given: dict[str, float] = {}
        for item in filter(None, map(str.strip, text.split(","))):
            name, _, value = map(str.strip, item.partition("="))
            try:
                if name not in known or name in given:
                    raise ValueError
                given[name] = float(value)
            except ValueError:
                raise UserError(
                    f"cost {item!r} is not valid: write NAME=NUMBER, with NAME one of {', '.join(sorted(known))}, "
                    "each at most once"
                ) from None
        own = {name: given.pop(name) for name in _OWN if name in given}
        return cls(**own, other=given)

    def nominal(self, ranks: int) -> PassCosts:
        """Return `self`, because these costs are equal on all ranks."""
        return self

    def duration(self, schedule: Schedule, rank: int, step: Pass) -> float:
        """Duration of a pass of `schedule`; a whole backward takes B + W, and a V takes S + T + IF + IB."""
        parts = ("S", "T", "IF", "IB") if step.kind is PassKind.V else _parts(schedule, step.kind)
        named = self.named()
        took = reduce(add, (named.get(part, 0.0) for part in parts))
        return took / schedule.chunks if step.kind.per_chunk else took

    def saved(self, schedule: Schedule, rank: int, forward: Pass, backward: Pass) -> float:
        """Time that a pair saves: none, because these costs know nothing of the communication inside passes."""
        return 0.0

    def communication(self, schedule: Schedule, operation: Operation) -> float:
        """Duration of an operation of `schedule`."""
        return self.other.get("copy", 0.0) / schedule.chunks if isinstance(operation, Copy) else self.comm

    def evened(self) -> PassCosts:
        """These costs with F, B and W replaced by their mean, and with `comm` set to 0."""
        share = (self.F + self.B + self.W) / 3
        return replace(self, F=share, B=share, W=share, comm=0.0)

    def without_zeros(self) -> PassCosts:
        """These costs with F, B and W raised to at least 1/1000 of their sum, because nominal times need durations
        above 0.
        """
        floor = 1e-3 * (self.F + self.B + self.W) or 1.0
        return replace(self, F=max(self.F, floor), B=max(self.B, floor), W=max(self.W, floor))


_OWN = tuple(entry.name for entry in fields(PassCosts) if entry.name != "other")

_NOT_NAMED = (PassKind.BW, PassKind.V, PassKind.O, PassKind.R)
"""Kinds of pass for which users give no duration: BW and V combine other passes; O and R only start or await copies."""


@dataclass(frozen=True)
class StageCosts:
    """Durations of single passes and operations, which may differ between stages, ranks and links.

    F, B (input gradient) and W (weight gradient) have one duration per virtual stage. S, T, IF, IB and V have one
    duration per rank, and are empty if the schedule has no such passes. `hidden` has, per virtual stage, the times that
    an F and a whole backward save if they run as one with another pass. The keys of `messages` are (source rank, target
    rank, channel). The keys of `copies` are (to_host, rank, chunk), where `to_host` is False for copies back to the
    device. Passes and operations without an entry take no time.
    """

    F: tuple[float, ...]
    B: tuple[float, ...]
    W: tuple[float, ...]
    S: tuple[float, ...] = ()
    T: tuple[float, ...] = ()
    IF: tuple[float, ...] = ()
    IB: tuple[float, ...] = ()
    V: tuple[float, ...] = ()
    messages: Mapping[tuple[int, int, Channel], float] = field(default_factory=dict, hash=False)
    collectives: Mapping[CollectiveKind, float] = field(default_factory=dict, hash=False)
    copies: Mapping[tuple[bool, int, int], float] = field(default_factory=dict, hash=False)
    hidden: tuple[tuple[float, float], ...] = ()

    def named(self) -> dict[str, tuple[float, ...]]:
        """Durations of passes by kind."""
        return {kind: getattr(self, kind) for kind in PASSES}

    def evened(self) -> StageCosts:
        """These costs with each stage's F, B and W replaced by their mean; messages and collectives take no time."""
        share = tuple(sum(times) / 3 for times in zip(self.F, self.B, self.W, strict=True))
        return replace(self, F=share, B=share, W=share, messages={}, collectives={}, hidden=())

    def nominal(self, ranks: int) -> PassCosts:
        """Mean durations over stages, ranks and operations, from which a schedule of `ranks` ranks is generated.

        If V is given but S is not, S gets the duration of V.
        """
        output = {"S": self.S or self.V, "T": self.T, "IF": self.IF, "IB": self.IB}
        other = {"copy": len(self.F) / ranks * fmean(self.copies.values())} if self.copies else {}
        operations = (*self.messages.values(), *self.collectives.values())
        return PassCosts(
            F=sum(self.F) / ranks,
            B=sum(self.B) / ranks,
            W=sum(self.W) / ranks,
            **{kind: fmean(times or (0.0,)) for kind, times in output.items()},
            comm=fmean(operations or (0.0,)),
            other=other,
        )

    def duration(self, schedule: Schedule, rank: int, step: Pass) -> float:
        """Duration of a pass of `schedule`; a whole backward takes B + W."""
        place = schedule.placement.stage_of[rank][step.chunk] if step.kind.per_chunk else rank
        named = [getattr(self, part, ()) for part in _parts(schedule, step.kind)]
        if step.kind is PassKind.S and not self.S and not self.T:
            # In an expanded interlaced schedule, S takes as long as the whole V. The passes T, IF and IB take no time.
            named = [self.V]
        return reduce(add, (times[place] if times else 0.0 for times in named))

    def saved(self, schedule: Schedule, rank: int, forward: Pass, backward: Pass) -> float:
        """Time that a pair saves, because each of its passes computes while the other one communicates."""
        if not self.hidden:
            return 0.0
        stages = schedule.placement.stage_of[rank]
        return self.hidden[stages[forward.chunk]][0] + self.hidden[stages[backward.chunk]][1]

    def communication(self, schedule: Schedule, operation: Operation) -> float:
        """Duration of an operation of `schedule`."""
        named: tuple[Mapping[Any, float], ...] = (self.messages, self.collectives, self.copies)
        return next((times[operation.timing_key] for times in named if operation.timing_key in times), 0.0)


def _parts(schedule: Schedule, kind: PassKind) -> tuple[str, ...]:
    """The kinds whose durations add up to that of a pass."""
    whole = kind is PassKind.BW or (kind is PassKind.B and not schedule.split_backward)
    return ("B", "W") if whole else (kind,)


PASSES = tuple(entry.name for entry in fields(StageCosts) if entry.name in PassKind)

Costs = PassCosts | StageCosts

LONGEST = 1e15
"""Longest accepted duration. Rounding could lose a short duration that is added to one longer than this."""


def _check(name: str, value: float) -> None:
    if not 0 <= value <= LONGEST:
        raise UserError(f"cost {name}={value:g} is not a valid duration; give a number from 0 to {LONGEST:g}")
