"""A schedule family: what the rest of the package may ask about a way to order passes, and how it makes a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron_vp.errors import UserError
from megatron_vp.schedule.blocks import BuildingBlock
from megatron_vp.schedule.costs import Costs, PassCosts, StageCosts
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.reorder import evaluation, forwards, reorder_for_costs
from megatron_vp.schedule.vocab_passes import Nominal, nominal_schedule

Block = Callable[[int, int, PassCosts], BuildingBlock]
"""(pipeline size, chunks, costs) -> building block."""
Order = Callable[[int, int], Schedule]
"""(pipeline size, microbatches) -> schedule."""

SHARDED = (VocabMethod.NONE, VocabMethod.VOCAB_1, VocabMethod.VOCAB_2)

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
    fixed: Schedule | None = field(default=None, compare=False, repr=False)
    """of a file: the schedule, which has one number of ranks and of microbatches"""

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
        """The vocabulary method of a family that runs with that one alone; None where there is a choice."""
        return self.methods[0] if self.methods[1:] == () and self.methods[0] is not VocabMethod.NONE else None

    def method(self, vocab: VocabMethod) -> VocabMethod:
        """The method that a run uses where `vocab` is asked for."""
        return self.own_method or vocab

    def at_most(self, microbatches: int) -> int:
        """So many microbatches, or as many as a file has."""
        return microbatches if self.fixed is None else min(microbatches, self.fixed.microbatches)

    def schedule(
        self,
        pipeline_size: int,
        microbatches: int,
        vocab: VocabMethod = VocabMethod.NONE,
        chunks: int | None = None,
        costs: Costs | None = None,
        vocab_ranks: Iterable[int] | None = None,
        further_orders: bool = True,
    ) -> Schedule:
        """A complete schedule, vocabulary passes included, ordered for `costs`. Raises UserError as `generate` does."""
        self._check(pipeline_size, microbatches, vocab, chunks)
        holders, chunks = self._holders(pipeline_size, vocab, vocab_ranks), self.chunks_of(chunks)
        if self.fixed is not None:
            whole = self.fixed.microbatches == microbatches
            return self.fixed if whole else self.fixed.first_microbatches(microbatches)
        if self.order is not None:
            return self.order(pipeline_size, microbatches)
        costs = costs or PassCosts()
        nominal = self.nominal(pipeline_size, microbatches, vocab, chunks, costs, holders)
        return reorder_for_costs(nominal.schedule, nominal.limits, costs, nominal.pairs, further_orders)

    def nominal(
        self,
        pipeline_size: int,
        microbatches: int,
        vocab: VocabMethod,
        chunks: int,
        costs: Costs,
        vocab_ranks: Sequence[int],
    ) -> Nominal:
        """The passes of a family that has a building block, not yet ordered for `costs`, and their limits."""
        assert self.block is not None
        if isinstance(costs, StageCosts):
            costs.check_size(self.name, pipeline_size, chunks)
        # Nominal times only order the passes, so means over ranks and stages do. The block's forwards are longer by the
        # vocabulary work, so that its nominal times leave room for it.
        mean = costs.nominal(pipeline_size)
        work = mean.S + mean.T + mean.IF + mean.IB if vocab.is_sharded else 0.0
        block = self.block(pipeline_size, chunks, replace(mean, F=mean.F + work).without_zeros())
        return nominal_schedule(self.name, block, microbatches, vocab, vocab_ranks)

    def evaluation(
        self,
        pipeline_size: int,
        microbatches: int,
        vocab: VocabMethod = VocabMethod.NONE,
        chunks: int | None = None,
        costs: Costs | None = None,
        vocab_ranks: Iterable[int] | None = None,
    ) -> Schedule:
        """What an evaluation of any number of microbatches runs: forwards alone, in an order of their own."""
        if self.fixed is not None:
            self._holders(pipeline_size, vocab, vocab_ranks)
            return evaluation(forwards(self.fixed, microbatches), costs)
        return evaluation(self.schedule(pipeline_size, microbatches, vocab, chunks, costs, vocab_ranks), costs)

    def _holders(self, pipeline_size: int, vocab: VocabMethod, vocab_ranks: Iterable[int] | None) -> tuple[int, ...]:
        """The ranks with vocabulary rows where `vocab_ranks` are asked for (None: all that the schedule can have)."""
        every = tuple(range(pipeline_size)) if self.method(vocab) is not VocabMethod.NONE else ()
        if self.fixed is not None:
            every = self.fixed.vocab_ranks
        if vocab_ranks is None:
            return every
        holders = tuple(sorted(vocab_ranks))
        if holders == every:
            return every
        asked = f"vocabulary rows on ranks {', '.join(map(str, holders)) or 'none'}"
        if self.fixed is not None:
            raise UserError(
                f"{asked} do not go with the schedule in {self.name}, which has vocabulary passes on ranks "
                f"{', '.join(map(str, every)) or 'none'}; write one for these ranks"
            )
        if not vocab.is_sharded:
            need = "which every rank takes part in" if every else "which has no vocabulary passes"
            raise UserError(f"{asked} do not go with schedule {self.name}, vocab method {self.method(vocab)}, {need}")
        if not holders or len(set(holders)) < len(holders) or not set(holders) <= set(every):
            raise UserError(f"{asked}: give at least one of the ranks 0 to {pipeline_size - 1}, each at most once")
        return holders

    def _check(self, pipeline_size: int, microbatches: int, vocab: VocabMethod, chunks: int | None) -> None:
        own = self.own_method
        if vocab not in self.methods and (own is None or vocab is not VocabMethod.NONE):
            takes = f"which has {own}" if own else f"which takes {', '.join(self.methods)}"
            raise UserError(f"vocab method {vocab} does not go with schedule {self.name}, {takes}")
        if self.fixed is not None:
            self._check_fixed(self.fixed, pipeline_size, microbatches)
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

    def _check_fixed(self, fixed: Schedule, pipeline_size: int, microbatches: int) -> None:
        ranks = f"{fixed.pipeline_size} ranks, and {pipeline_size} are asked for"
        steps = f"{fixed.microbatches} microbatches, and {microbatches} are asked for"
        for has, fits in ((ranks, fixed.pipeline_size == pipeline_size), (steps, microbatches <= fixed.microbatches)):
            if not fits:
                raise UserError(f"the schedule in {self.name} has {has}; write one for these")
