"""Defines `Family`: the properties of a schedule family that the rest of the package uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor, gcd

from megatron_vp.errors import UserError
from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.ledger import peak
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement

Block = Callable[[int, int, PassCosts], BuildingBlock]
"""Makes the building block for a pipeline size, a number of chunks per rank, and costs."""
Order = Callable[[int, int], Schedule]
"""Makes the schedule for a pipeline size and a number of microbatches."""

SHARDED = (VocabMethod.NONE, VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)


@dataclass(frozen=True)
class Family:
    """A way to order the passes of a pipeline."""

    name: str
    summary: str
    """one line, for help texts and tables"""
    peak: str
    """the activations that rank r may hold at a time, without those that `promised_peak` adds for vocab-1 and vocab-2,
    as a formula in pipeline size p, rank r and chunks per rank v; the unit is one microbatch's activations on a rank
    """
    placement: Callable[[int, int], Placement] = Placement.round_robin
    """makes the placement of the virtual stages for a pipeline size and a number of chunks per rank"""
    block: Block | None = None
    """the building block, into which vocabulary passes are inserted; a search then changes the order of its passes to
    reduce the makespan for the real costs, within `promised_peak`
    """
    overlapped: Block | None = None
    """the building block whose pairs run as one, with --overlap-moe-expert-parallel-comm; None if there is none"""
    order: Order | None = None
    """the complete schedule, for a family with a fixed order"""
    chunks: int | None = 1
    """chunks per rank; None if the user chooses the number, which must be at least two"""
    methods: tuple[VocabMethod, ...] = SHARDED
    """supported vocabulary methods, the default first"""
    splits_backward: bool = False
    """whether at least some backwards are split into B and W"""
    planned: bool = True
    """whether `megatron-vp plan` considers the family"""
    in_megatron: bool = False
    """whether Megatron itself supports the family's order if the vocabulary layers are not split"""
    bases: tuple[Family, ...] = ()
    """if the family is flexible, the families with the same placement, whose schedules it may also use to fit a memory
    limit; otherwise empty
    """
    shape: str = ""
    """the building block, such as `slack=12,gap=2` or `v-half`, if the family was fitted to a memory limit"""
    limit: int | None = None
    """largest number of chunk activations that a rank may hold, if the family was fitted with a block that is not from
    `bases`
    """
    fixed: Schedule | None = field(default=None, hash=False, repr=False)
    """the schedule from a file; it must have the requested number of ranks and, for training, at least the requested
    number of microbatches
    """

    def chunks_of(self, chunks: int | None) -> int:
        """The number of chunks per rank if the user requests `chunks`, or the default if `chunks` is None. Raises
        UserError if the family does not support the number.
        """
        if self.chunks is None:
            chunks = 2 if chunks is None else chunks
            if chunks < 2:
                raise UserError(
                    f"schedule {self.name} needs at least 2 chunks per rank, got {chunks}; for one, use 1f1b or zb-h1"
                )
            return chunks
        if chunks not in (None, self.chunks):
            own = f"{self.chunks} chunk{'s' * (self.chunks > 1)}"
            raise UserError(f"schedule {self.name} has {own} per rank, got {chunks}; leave out the number of chunks")
        return self.chunks

    def placement_of(self, pipeline_size: int, chunks: int | None = None) -> Placement:
        """The placement of virtual stages. Raises UserError if the family does not support `chunks`."""
        return self.placement(pipeline_size, self.chunks_of(chunks))

    @property
    def ends_on_last_rank(self) -> bool:
        """Whether the last virtual stage is on rank p-1, as in Megatron; in a V shape it is on rank 0."""
        some = self._some_placement()
        return some.last_rank == some.ranks - 1

    @property
    def in_rounds(self) -> bool:
        """Whether chunk c of rank r is stage c * p + r, as Megatron places chunks."""
        some = self._some_placement()
        return some == Placement.round_robin(some.ranks, some.chunks)

    def _some_placement(self) -> Placement:
        return self.fixed.placement if self.fixed else self.placement_of(4)

    @property
    def own_method(self) -> VocabMethod | None:
        """The only vocabulary method that the family supports; None if it supports several, or only `none`."""
        return self.methods[0] if self.methods[1:] == () and self.methods[0] is not VocabMethod.NONE else None

    def method(self, vocab: VocabMethod) -> VocabMethod:
        """The vocabulary method to use if the user requests `vocab`."""
        return self.own_method or vocab

    @property
    def has_pairs(self) -> bool:
        """Whether its forwards and backwards can run as one."""
        return self.overlapped is not None or bool(self.fixed and self.fixed.pairs)

    def promised_peak(
        self,
        pipeline_size: int,
        rank: int,
        chunks: int,
        microbatches: int,
        method: VocabMethod,
        overlapped: bool = False,
    ) -> int:
        """The largest number of chunk activations that `rank` may hold, at most `microbatches * chunks`.

        One chunk activation stands for all activations that a chunk keeps for one microbatch. The number is the
        family's `limit` if it has one, or the peak of the schedule from a file. Otherwise, it is the family's peak,
        plus `chunks` activations for each barrier of vocab-1 or vocab-2, plus those of `BuildingBlock.apart`.
        """
        if self.limit is not None:
            most = self.limit
        elif self.fixed is not None:
            most = peak(self.fixed.ranks[rank], Held.ACTIVATIONS)
        else:
            sizes = {"p": pipeline_size, "r": rank, "v": chunks}
            most = round(chunks * eval(self.peak, {"ceil": ceil, "floor": floor, "gcd": gcd}, sizes))
            if method.is_sharded:
                most += method.barriers * chunks
            if overlapped and self.overlapped:
                most += self.overlapped(pipeline_size, chunks, PassCosts()).apart
        return min(most, microbatches * chunks)
