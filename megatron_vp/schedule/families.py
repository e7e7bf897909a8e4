"""The schedule families: one record each, with all that anything outside the generators may ask about a schedule.

To add a family, write its generator and add a record to FAMILIES. A schedule read from a file has a record of the same
form (`files.py`), so what a run does is decided by properties and never by a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_vp.errors import UserError
from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.gc_paused import gc_paused
from megatron_vp.schedule.generators.dual_pipe_v import dual_pipe_v
from megatron_vp.schedule.generators.interlaced import interlaced
from megatron_vp.schedule.generators.interleaved import interleaved
from megatron_vp.schedule.generators.one_f_one_b import one_f_one_b
from megatron_vp.schedule.generators.v_half import v_half
from megatron_vp.schedule.generators.v_min import v_min
from megatron_vp.schedule.generators.zb_h1 import zb_h1
from megatron_vp.schedule.generators.zb_v import zb_v
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.reorder import reorder_for_costs
from megatron_vp.schedule.vocab_passes import nominal_schedule

Block = Callable[[int, int, PassCosts], BuildingBlock]
"""(pipeline size, chunks, costs) -> building block."""
Order = Callable[[int, int], Schedule]
"""(pipeline size, microbatches) -> schedule."""

SHARDED = (VocabMethod.NONE, VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)

DEFAULT_SCHEDULE = "1f1b"
"""What runs where no schedule is asked for."""

LARGEST = 1_000_000
"""Ranks x microbatches x chunks: some three minutes on one core and 6 GB."""


@dataclass(frozen=True)
class Family:
    """A way to order the passes of a pipeline."""

    name: str
    summary: str
    """one line, for help texts and tables"""
    placement: Callable[[int, int], Placement]
    """(pipeline size, chunks) -> which virtual stage sits where"""
    peak_activation: str
    """most microbatches that rank r of p holds, as a formula, without vocabulary passes"""
    block: Block | None = None
    """its building block, into which vocabulary passes are put, and which is then ordered by real costs"""
    order: Order | None = None
    """the whole order, for a family that leaves nothing to be reordered"""
    chunks: int | None = 1
    """per rank; None: the user chooses, at least two"""
    methods: tuple[VocabMethod, ...] = SHARDED
    """vocabulary methods that it goes with, the default first"""
    splits_backward: bool = False
    """some weight gradients are passes W of their own"""
    in_megatron: bool = False
    """Megatron itself runs this order where the vocabulary layers are whole"""
    pipeline_size: int | None = None
    """the only number of ranks that it has; None: any"""
    microbatches: int | None = None
    """the only number of microbatches that it has; None: any"""

    def chunks_of(self, chunks: int | None) -> int:
        """Chunks per rank where `chunks` are asked for. Raises UserError where it cannot have them."""
        if self.chunks is None:
            chunks = 2 if chunks is None else chunks
            if chunks < 2:
                raise UserError(f"schedule {self.name} needs at least 2 chunks a rank, got {chunks}; with 1 it is 1f1b")
            return chunks
        if chunks not in (None, self.chunks):
            own = f"{self.chunks} chunk{'s' * (self.chunks > 1)}"
            raise UserError(f"schedule {self.name} has {own} a rank, got {chunks}; leave the chunks out")
        return self.chunks

    def placement_of(self, pipeline_size: int, chunks: int | None = None) -> Placement:
        """Which virtual stage sits where. Raises UserError for chunks that it cannot have."""
        return self.placement(pipeline_size, self.chunks_of(chunks))

    @property
    def ends_on_last_rank(self) -> bool:
        """Whether the last virtual stage is on rank p-1, as in Megatron; in a V it is on rank 0."""
        some = self.placement_of(self.pipeline_size or 4)
        return some.last_rank == some.ranks - 1

    @property
    def in_rounds(self) -> bool:
        """Whether chunk c of rank r is stage c p + r, as Megatron places chunks."""
        some = self.placement_of(self.pipeline_size or 4)
        return some == Placement.round_robin(some.ranks, some.chunks)

    @property
    def own_method(self) -> VocabMethod | None:
        """The vocabulary method of a family that has only one; None where the user chooses."""
        return self.methods[0] if len(self.methods) == 1 else None

    def method(self, vocab: VocabMethod) -> VocabMethod:
        """The method that a run with vocabulary parallelism uses where `vocab` is asked for."""
        return self.own_method or vocab

    def schedule(
        self,
        pipeline_size: int,
        microbatches: int,
        vocab: VocabMethod = VocabMethod.NONE,
        chunks: int | None = None,
        costs: PassCosts | None = None,
    ) -> Schedule:
        """A complete schedule, vocabulary passes included, ordered for `costs`. Raises UserError as `generate` does."""
        self._check(pipeline_size, microbatches, vocab, chunks)
        chunks = self.chunks_of(chunks)
        if self.order is not None:
            return self.order(pipeline_size, microbatches)
        assert self.block is not None
        costs = costs or PassCosts()
        # The block's forwards are longer by the vocabulary work, so that its nominal times leave room for it.
        work = costs.S + costs.T + costs.IF + costs.IB if vocab.is_sharded else 0.0
        block = self.block(pipeline_size, chunks, replace(costs, F=costs.F + work).without_zeros())
        nominal = nominal_schedule(self.name, block, microbatches, vocab)
        return reorder_for_costs(nominal.schedule, nominal.limits, costs, nominal.pairs)

    def _check(self, pipeline_size: int, microbatches: int, vocab: VocabMethod, chunks: int | None) -> None:
        own = self.own_method
        if vocab not in self.methods and (own is None or vocab is not VocabMethod.NONE):
            takes = f"which has {own}" if own else f"which takes {', '.join(self.methods)}"
            raise UserError(f"vocab method {vocab} does not go with schedule {self.name}, {takes}")
        least = 1 if vocab is VocabMethod.NONE and own is None else 2
        if pipeline_size < least:
            raise UserError(
                f"pipeline size {pipeline_size} is too small for {self.name}, vocab method {vocab}; "
                f"give at least {least}"
            )
        if microbatches < 1:
            raise UserError(f"{microbatches} microbatches make no schedule; give at least 1")
        if pipeline_size * microbatches * (chunks or 1) > LARGEST:
            size = f"{pipeline_size} ranks x {microbatches} microbatches" + (f" x {chunks} chunks" if chunks else "")
            raise UserError(
                f"{size} are more than {LARGEST:,} forwards, which would take "
                "minutes and gigabytes; fewer microbatches show the same steady state"
            )


def _v_shape(pipeline_size: int, chunks: int) -> Placement:
    return Placement.v_shape(pipeline_size)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            DEFAULT_SCHEDULE,
            "one forward, one backward; Megatron's default",
            Placement.round_robin,
            "p - r",
            block=one_f_one_b,
            in_megatron=True,
        ),
        Family(
            "interleaved",
            "1F1B with several chunks per rank, in rounds",
            Placement.round_robin,
            "(2(p - 1 - r) + (v - 1)p + 1) / v",
            block=interleaved,
            chunks=None,
            in_megatron=True,
        ),
        Family(
            "zb-h1",
            "1F1B with the backward split, W in the cool-down",
            Placement.round_robin,
            "p",
            block=zb_h1,
            splits_backward=True,
        ),
        Family(
            "zb-v",
            "V shape, 1F1B's memory, hardly a bubble",
            _v_shape,
            "p",
            block=zb_v,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "v-half",
            "V shape, half of 1F1B's memory",
            _v_shape,
            "p/2 + 1, (p + 1)/2 for odd p",
            block=v_half,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "v-min",
            "V shape, a third of 1F1B's memory",
            _v_shape,
            "ceil((p + 2)/3)",
            block=v_min,
            chunks=2,
            splits_backward=True,
        ),
        Family(
            "interlaced",
            "1F1B with one synchronous vocabulary pass",
            Placement.round_robin,
            "floor(1.5 p) - r",
            order=interlaced,
            methods=(VocabMethod.INTERLACED,),
        ),
        Family(
            "dualpipe-v",
            "V shape, forwards beside whole backwards",
            _v_shape,
            "p + 1/2",
            block=dual_pipe_v,
            chunks=2,
            splits_backward=True,
        ),
    )
}
"""By name."""


def family(name: str) -> Family:
    """The record of a family. Raises UserError for an unknown name."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, 1, 0)
        raise UserError(f"schedule {name!r} is unknown; nearest is {near[0]!r}, known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def megatrons_own(chunks: int | None = None) -> Family:
    """What Megatron runs by itself with so many chunks per rank."""
    several = (chunks or 1) > 1
    return next(each for each in FAMILIES.values() if each.in_megatron and (each.chunks is None) == several)


@gc_paused()
def generate(
    name: str,
    pipeline_size: int,
    microbatches: int,
    *,
    vocab: VocabMethod | str = VocabMethod.NONE,
    chunks: int | None = None,
    costs: PassCosts | None = None,
) -> Schedule:
    """A complete schedule of family `name`, vocabulary passes included, ordered for `costs`.

    Raises UserError for an unknown family or vocabulary method, fewer than one rank or microbatch, vocabulary passes
    on fewer than two ranks, chunks that the family cannot have, and more than LARGEST forwards.
    """
    chosen = family(name)
    try:
        vocab = VocabMethod(vocab)
    except ValueError:
        raise UserError(f"vocab method {vocab!r} is unknown; use one of {', '.join(VocabMethod)}") from None
    return chosen.schedule(pipeline_size, microbatches, vocab, chunks, costs)
