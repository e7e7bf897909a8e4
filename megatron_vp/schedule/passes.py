"""Defines schedules as data: the passes of every rank and their order, but not how passes run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron_vp.errors import UserError
from megatron_vp.schedule.pass_kinds import PassKind
from megatron_vp.schedule.placement import Placement


class ScheduleError(ValueError):
    """Raised for a schedule or program that cannot run."""


class VocabMethod(StrEnum):
    """How the vocabulary layers are distributed over the ranks."""

    NONE = "none"
    VOCAB_1 = "vocab-1"
    VOCAB_2 = "vocab-2"
    INTERLACED = "interlaced"

    @classmethod
    def _missing_(cls, value: object) -> VocabMethod:
        raise UserError(f"vocab method {value!r} is unknown; use one of {', '.join(cls)}")

    @property
    def barriers(self) -> int:
        """How often the last stage awaits all ranks between an F and its B; each wait adds a microbatch in flight."""
        return {"none": 0, "vocab-1": 2, "vocab-2": 1, "interlaced": 1}[self]

    @property
    def passes(self) -> tuple[PassKind, ...]:
        """The kinds of pass that every rank with vocabulary rows runs once per microbatch."""
        if self.is_sharded:
            return (PassKind.IF, PassKind.S, PassKind.T, PassKind.IB)
        return (PassKind.V,) if self is VocabMethod.INTERLACED else ()

    @property
    def is_sharded(self) -> bool:
        """Whether ranks with vocabulary rows run IF, S, T and IB for each microbatch."""
        return self in (VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)


_PASS = re.compile(r"([A-Z]+)(\d+)(?:\.(\d+))?")


class Pass(NamedTuple):
    """One step of computation of one microbatch; prints as `F12` (chunk 0) or `F12.1` (chunk 1)."""

    kind: PassKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Parse the output of `str`. Raises ValueError for any other text."""
        match = _PASS.fullmatch(text.strip())
        if match is None or match[1] not in PassKind:
            raise ValueError(
                f"{text!r} is not a pass; expected a kind, a microbatch and perhaps a chunk, as in F12 or B3.1"
            )
        kind, microbatch, chunk = match.groups()
        return cls(PassKind(kind), int(microbatch), int(chunk or 0))


@dataclass(frozen=True)
class Schedule:
    """An order of passes for every rank: `ranks[r]` lists the passes of rank r in execution order.

    A backward is either split into B (input gradient) and W (weight gradient), or whole. A whole backward is called BW
    in a schedule that has W passes, and B in a schedule without them.
    """

    name: str
    vocab: VocabMethod
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    shape: str = ""
    """the building block, such as `slack=12,gap=2` or `v-half`, if the family was fitted to a memory limit"""
    pairs: tuple[tuple[tuple[Pass, Pass], ...], ...] = ()
    """for each rank, the (forward, backward) pairs that run as one, in order; the expert communication of each pass
    hides behind the computation of the other; in `ranks`, the backward comes right after its forward; empty if all
    passes run alone
    """

    @property
    def pipeline_size(self) -> int:
        """Number of pipeline ranks, p."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Number of chunks per rank, v."""
        return self.placement.chunks

    @cached_property
    def kinds(self) -> frozenset[PassKind]:
        """The kinds of pass in the schedule."""
        return frozenset(kind for order in self.ranks for kind in {step.kind for step in order})

    @cached_property
    def vocab_ranks(self) -> tuple[int, ...]:
        """The ranks with vocabulary rows: all in an interlaced schedule, otherwise those with a vocabulary pass."""
        if self.vocab is VocabMethod.INTERLACED:
            return tuple(range(self.pipeline_size))
        kinds = self.vocab.passes
        return tuple(rank for rank, order in enumerate(self.ranks) if any(step.kind in kinds for step in order))

    @cached_property
    def vocab_members(self) -> tuple[int, ...]:
        """The ranks in the vocabulary collectives (`Placement.vocab_members`); empty if there are no collectives."""
        if self.vocab is VocabMethod.NONE:
            return ()
        return self.placement.vocab_members(self.vocab_ranks)

    @cached_property
    def offloaded(self) -> tuple[tuple[int, int], ...]:
        """The (rank, chunk) pairs whose activations are offloaded to host memory between forward and backward."""
        moved = (PassKind.O, PassKind.R)
        pairs = {(rank, step.chunk) for rank, order in enumerate(self.ranks) for step in order if step.kind in moved}
        return tuple(sorted(pairs))

    @property
    def split_backward(self) -> bool:
        """Whether a B computes only the input gradient."""
        return PassKind.W in self.kinds

    @property
    def has_backward(self) -> bool:
        """Whether the schedule has backward passes."""
        return PassKind.B in self.kinds or PassKind.BW in self.kinds

    @cached_property
    def whole_backwards(self) -> dict[tuple[int, Pass], None]:
        """Every BW with its rank; a dict without values, because a set would have no order."""
        return {
            (rank, step): None for rank, order in enumerate(self.ranks) for step in order if step.kind is PassKind.BW
        }

    @cached_property
    def partners(self) -> dict[tuple[int, Pass], Pass]:
        """Maps every pass of a pair, with its rank, to the other pass of its pair."""
        ordered = ((rank, pair) for rank, pairs in enumerate(self.pairs) for pair in pairs)
        return {(rank, pair[half]): pair[1 - half] for rank, pair in ordered for half in (0, 1)}

    def forward_only(self) -> Schedule:
        """The same order with only the passes that evaluation runs, such as IF, F and S."""
        kept = tuple(tuple(step for step in order if step.kind.forward) for order in self.ranks)
        return replace(self, ranks=kept, pairs=())

    def first_microbatches(self, microbatches: int) -> Schedule:
        """The same order with only the first `microbatches` microbatches."""
        kept = tuple(tuple(step for step in order if step.microbatch < microbatches) for order in self.ranks)
        pairs = tuple(
            tuple(pair for pair in each if all(step.microbatch < microbatches for step in pair)) for each in self.pairs
        )
        return replace(self, microbatches=microbatches, ranks=kept, pairs=pairs)
