"""A schedule is data: passes, their order on every rank, and nothing about how they run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron_vp.schedule.placement import Placement


class ScheduleError(ValueError):
    """A schedule or program that cannot run. First line: the defect; further lines: the schedule around it."""


class PassKind(StrEnum):
    """What a pass computes."""

    __hash__ = str.__hash__  # an enum's own is Python code, and large schedules hash passes millions of times

    IF = "IF"
    """embedding rows of the rank's vocabulary shard"""
    F = "F"
    """forward of a chunk"""
    S = "S"
    """first output-layer pass on the rank's shard"""
    T = "T"
    """second output-layer pass on the rank's shard"""
    V = "V"
    """the whole vocabulary work of a microbatch, synchronous on all ranks"""
    B = "B"
    """backward of a chunk; the input gradient only where W passes exist"""
    W = "W"
    """weight gradient of a chunk"""
    IB = "IB"
    """embedding gradient of the rank's shard"""


class VocabMethod(StrEnum):
    """How the vocabulary layers are spread over the ranks."""

    NONE = "none"
    VOCAB_1 = "vocab-1"
    VOCAB_2 = "vocab-2"
    INTERLACED = "interlaced"

    @property
    def barriers(self) -> int:
        """Waits for all ranks between F and B of the last stage; each costs one more microbatch in flight."""
        return {"none": 0, "vocab-1": 2, "vocab-2": 1, "interlaced": 1}[self]

    @property
    def is_sharded(self) -> bool:
        """True where every rank runs IF, S, T and IB of each microbatch."""
        return self in (VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)


_PASS = re.compile(r"(IF|IB|F|S|T|V|B|W)(\d+)(?:\.(\d+))?")


class Pass(NamedTuple):
    """One step of computation of one microbatch; prints as `F12` (chunk 0) or `F12.1` (chunk 1)."""

    kind: PassKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Read back what `str` printed. Raises ValueError for anything else."""
        match = _PASS.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a pass; expected a kind, a microbatch and perhaps a chunk, as in F12 or B3.1"
            )
        kind, microbatch, chunk = match.groups()
        return cls(PassKind(kind), int(microbatch), int(chunk or 0))


FORWARD_KINDS = (PassKind.IF, PassKind.F, PassKind.S, PassKind.V)


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` lists the passes of rank r in execution order.

    Without `split_backward` a B computes input and weight gradient, and there is no W.
    """

    name: str
    vocab: VocabMethod
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    split_backward: bool = False

    @property
    def pipeline_size(self) -> int:
        """Pipeline ranks p."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Chunks a rank v."""
        return self.placement.chunks

    @cached_property
    def has_backward(self) -> bool:
        """False for a schedule made by `forward_only`."""
        return any(step.kind is PassKind.B for order in self.ranks for step in order)

    def activation_levels(self, rank: int) -> list[tuple[float, float]]:
        """Activations held during and after each pass of `rank`, in microbatches of a whole rank.

        A chunk holds 1/chunks from the start of its F to the end of its B, or of its W where the backward is split;
        without a backward, during its F only.
        """
        release = PassKind.W if self.split_backward else PassKind.B
        release = release if self.has_backward else PassKind.F
        levels, held = [], 0
        for step in self.ranks[rank]:
            during = held + (step.kind is PassKind.F)
            held = during - (step.kind is release)
            levels.append((during / self.chunks, held / self.chunks))
        return levels

    def forward_only(self) -> Schedule:
        """The same order with only IF, F and S, or F and V: what evaluation runs."""
        kept = tuple(tuple(step for step in order if step.kind in FORWARD_KINDS) for order in self.ranks)
        return replace(self, ranks=kept, split_backward=False)
