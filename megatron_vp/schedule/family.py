"""Defines the record of a schedule family: what the rest of the package may ask about a way to order passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_vp.errors import UserError
from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement

Block = Callable[[int, int, PassCosts], BuildingBlock]
"""(pipeline size, chunks, costs) -> building block."""
Order = Callable[[int, int], Schedule]
"""(pipeline size, microbatches) -> schedule."""
Peak = Callable[[int, int, int, int], int]
"""(pipeline size p, rank r, chunks v, microbatches m) -> chunk activations."""


class OrderPolicy(StrEnum):
    """Whether and how a building block's order is changed."""

    TIGHTEN = "tighten"
    """the order starts a search for the shortest order at the real costs, within the promised peaks"""
    KEEP = "keep"
    """the order is kept, whatever the costs"""


SHARDED = (VocabMethod.NONE, VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)


@dataclass(frozen=True)
class Family:
    """A way to order the passes of a pipeline."""

    name: str
    summary: str
    """one line, for help texts and tables"""
    placement: Callable[[int, int], Placement]
    """(pipeline size, chunks) -> the place of each virtual stage"""
    peak: Peak
    """largest number of chunk activations on a rank without vocabulary passes; may exceed what m microbatches have"""
    peak_formula: str
    """the same peak in microbatches of a whole rank, as text with p, r, v and m"""
    block: Block | None = None
    """its building block, into which vocabulary passes are inserted"""
    order_policy: OrderPolicy = OrderPolicy.TIGHTEN
    """how the block's order is changed"""
    order: Order | None = None
    """the whole order, for a family whose order is fixed"""
    chunks: int | None = 1
    """chunks per rank; None: the user chooses two or more"""
    methods: tuple[VocabMethod, ...] = SHARDED
    """vocabulary methods that it supports, the default first"""
    splits_backward: bool = False
    """whether some weight gradients are separate passes W"""
    planned: bool = True
    """whether `plan` considers it"""
    in_megatron: bool = False
    """whether Megatron itself runs this order if the vocabulary layers are whole"""
    bases: tuple[Family, ...] = ()
    """for a flexible family that can be fitted to a memory limit: base families, whose schedules are never shorter
    """
    shape: str = ""
    """for a flexible family that was fitted: the shape of its building block"""
    limit: int | None = None
    """for a flexible family that was fitted with its own block: the largest number of chunk activations"""
    fixed: Schedule | None = field(default=None, hash=False, repr=False)
    """for a file: its schedule, with a fixed number of ranks and of microbatches"""

    def chunks_of(self, chunks: int | None) -> int:
        """Chunks per rank if `chunks` are requested. Raises UserError if the family cannot have them."""
        if self.chunks is None:
            chunks = 2 if chunks is None else chunks
            if chunks < 2:
                one = "zb-h1" if self.splits_backward else "1f1b"
                raise UserError(
                    f"schedule {self.name} needs at least 2 chunks per rank, got {chunks}; for 1 take {one}"
                )
            return chunks
        if chunks not in (None, self.chunks):
            own = f"{self.chunks} chunk{'s' * (self.chunks > 1)}"
            raise UserError(f"schedule {self.name} has {own} per rank, got {chunks}; leave the chunks out")
        return self.chunks

    def placement_of(self, pipeline_size: int, chunks: int | None = None) -> Placement:
        """The placement of virtual stages. Raises UserError if the family cannot have `chunks`."""
        return self.placement(pipeline_size, self.chunks_of(chunks))

    @property
    def ends_on_last_rank(self) -> bool:
        """Whether the last virtual stage is on rank p-1, as in Megatron; in a V it is on rank 0."""
        some = self._some_placement()
        return some.last_rank == some.ranks - 1

    @property
    def in_rounds(self) -> bool:
        """Whether chunk c of rank r is stage c p + r, as Megatron places chunks."""
        some = self._some_placement()
        return some == Placement.round_robin(some.ranks, some.chunks)

    def _some_placement(self) -> Placement:
        return self.fixed.placement if self.fixed else self.placement_of(4)

    @property
    def own_method(self) -> VocabMethod | None:
        """The family's only vocabulary method; None if there is a choice."""
        return self.methods[0] if self.methods[1:] == () and self.methods[0] is not VocabMethod.NONE else None

    def method(self, vocab: VocabMethod) -> VocabMethod:
        """The method that a run uses if `vocab` is requested."""
        return self.own_method or vocab

    def promised_peak(self, pipeline_size: int, rank: int, chunks: int, microbatches: int, method: VocabMethod) -> int:
        """Largest number of chunk activations that `rank` may hold.

        This is the limit to which the family was fitted, or else its own peak plus one microbatch for each barrier.
        """
        if self.limit is not None:
            return min(self.limit, microbatches * chunks)
        peak = self.peak(pipeline_size, rank, chunks, microbatches)
        if method.is_sharded and self.fixed is None:
            peak += method.barriers * chunks
        return min(peak, microbatches * chunks)

    def at_most(self, microbatches: int) -> int:
        """The given number of microbatches, or the file's number if that is smaller."""
        return microbatches if self.fixed is None else min(microbatches, self.fixed.microbatches)
