"""Checks a request for a schedule, and generates the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule.costs import Costs, PassCosts, StageCosts
from megatron_vp.schedule.dependencies import returning_at_once
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.gc_paused import gc_paused
from megatron_vp.schedule.graph import Step
from megatron_vp.schedule.ledger import peaks
from megatron_vp.schedule.list_scheduler import MemoryLimits
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.placed_copies import computed_between, offload
from megatron_vp.schedule.reorder import evaluation, forwards, reorder_for_costs
from megatron_vp.schedule.timeline import simulate
from megatron_vp.schedule.vocab_passes import Nominal, nominal_schedule

LARGEST = 1_000_000
"""Largest accepted product of ranks, microbatches and chunks, or of ranks and microbatches if the family fixes the
number of chunks. Generating a schedule of this size takes about three minutes on one core, and 6 GB of memory.
"""


@dataclass(frozen=True)
class ScheduleRequest:
    """Everything that determines a schedule. `ScheduleRequest.of` fills in defaults.

    Raises UserError if the family does not support the method, the vocabulary ranks, the number of chunks, or the
    number of offloaded chunks. Other reasons for this error are too few ranks or microbatches, more than LARGEST
    forwards, costs for another number of stages or ranks, and a schedule file for another number of ranks. In training,
    the file must also have enough microbatches.
    """

    family: Family
    """The schedule family; for a schedule file, a family that contains only the file's schedule."""
    pipeline_size: int
    microbatches: int
    method: VocabMethod
    chunks: int
    """Number of chunks per rank, v."""
    costs: Costs
    """The durations of passes and operations, from which the order of the passes is chosen."""
    vocab_ranks: tuple[int, ...]
    """The ranks that hold vocabulary rows and run vocabulary passes, in ascending order."""
    forward_only: bool = False
    """Whether the schedule is for evaluation, which has no backward passes."""
    further_orders: bool = True
    """Whether to compare more orders, which takes longer and may find a shorter schedule."""
    offload_chunks: int = 0
    """Number of chunks per rank whose activations are in host memory between forward and backward."""

    @classmethod
    def of(
        cls,
        family: Family,
        pipeline_size: int,
        microbatches: int,
        *,
        method: VocabMethod = VocabMethod.NONE,
        chunks: int | None = None,
        costs: Costs | None = None,
        vocab_ranks: Iterable[int] | None = None,
        **more: Any,
    ) -> ScheduleRequest:
        """Make a request. If None, `chunks` is the family's default number, `costs` is `PassCosts()`, and `vocab_ranks`
        are all ranks that can hold rows. `more` are the other fields.

        If the family has only one method, `method=none` selects it.
        """
        if method is VocabMethod.NONE:
            method = family.method(method)
        if vocab_ranks is None:
            vocab_ranks = _every_rank(family, pipeline_size, method)
        return cls(
            family,
            pipeline_size,
            microbatches,
            method,
            family.chunks_of(chunks),
            costs or PassCosts(),
            tuple(sorted(vocab_ranks)),
            **more,
        )

    def __post_init__(self) -> None:
        self._check_method()
        self._check_sizes()
        self._check_vocab_ranks()
        self.family.chunks_of(self.chunks)
        self._check_offload()
        if isinstance(self.costs, StageCosts):
            self.costs.check_size(self.family.name, self.pipeline_size, self.chunks)

    @gc_paused()
    def schedule(self) -> Schedule:
        """Generate the complete schedule, including vocabulary passes."""
        fixed = self.family.fixed
        if self.forward_only:
            forward = self._complete() if fixed is None else forwards(fixed, self.microbatches)
            return evaluation(forward, self.costs)
        if fixed is None:
            return replace(self._complete(), shape=self.family.shape) if self.family.shape else self._complete()
        return fixed if fixed.microbatches == self.microbatches else fixed.first_microbatches(self.microbatches)

    def _complete(self) -> Schedule:
        if self.family.order is not None and not self.offload_chunks:
            return self.family.order(self.pipeline_size, self.microbatches)
        nominal = self.placed()
        if self.family.order is not None:
            return nominal.schedule
        return self._tightened(nominal, self.limits(nominal.schedule))

    def limits(self, nominal: Schedule) -> MemoryLimits:
        """The memory limits of the search for shorter orders, which starts from the schedule `nominal`."""
        if not nominal.offloaded and self.family.limit is None:
            return MemoryLimits(self.promised_peaks)
        device = peaks(nominal, Held.ACTIVATIONS)
        # A flexible family is limited to the peak of its nominal order. The search does not use all of
        # --activation-limit, because it can find a slower schedule under a higher limit.
        most = self.promised_peaks if self.family.limit is None else (max(device),) * self.pipeline_size
        if not nominal.offloaded:
            return MemoryLimits(most)
        # With offloading, a rank's limits can be higher than its nominal peaks, so that its passes wait less. On its
        # device, each rank may hold as many activations as the fullest rank holds in the nominal order, up to its own
        # limit in `most`. In host memory, it may hold the activations of one more F than in the nominal order.
        return MemoryLimits(
            tuple(max(own, min(max(device), bound)) for own, bound in zip(device, most, strict=True)),
            host=tuple(each + 1 for each in peaks(nominal, Held.HOST_ACTIVATIONS)),
        )

    def _tightened(self, nominal: Nominal, limits: MemoryLimits) -> Schedule:
        """Reorder the passes of `nominal` to shorten it, but keep a computing pass between each O and its R."""
        links: list[tuple[Step, Step]] = []
        for _ in range(4):
            found = reorder_for_costs(
                nominal.schedule, limits, self.costs, nominal.pairs, self.further_orders, links=links
            )
            early = returning_at_once(found)
            if not early:
                return found
            links += computed_between(nominal.schedule, found, early)
        return nominal.schedule

    @property
    def promised_peaks(self) -> tuple[int, ...]:
        """The largest number of chunk activations that each rank may hold; see `Family.promised_peak`."""
        sizes = self.chunks, self.microbatches, self.method
        return tuple(self.family.promised_peak(self.pipeline_size, rank, *sizes) for rank in range(self.pipeline_size))

    def placed(self) -> Nominal:
        """The nominal order, with passes O and R for offloaded chunks."""
        nominal = self.nominal()
        return nominal if self.forward_only else offload(nominal, self.offload_chunks, self.costs)

    def nominal(self) -> Nominal:
        """The passes and their nominal times, in the order of the building block or in the family's fixed order."""
        if self.family.order is not None:
            schedule = self.family.order(self.pipeline_size, self.microbatches)
            spans = simulate(schedule, self.costs).spans
            busiest = max(sum(end - start for start, end in each) for each in spans)
            return Nominal(schedule, (), spans, busiest / self.microbatches)
        assert self.family.block is not None
        # Nominal times only determine the order of passes, so mean costs over ranks and stages are precise enough. The
        # block's forwards include the vocabulary work, so that the nominal times leave time for this work.
        mean = self.costs.nominal(self.pipeline_size)
        work = mean.S + mean.T + mean.IF + mean.IB if self.method.is_sharded else 0.0
        block = self.family.block(self.pipeline_size, self.chunks, replace(mean, F=mean.F + work).without_zeros())
        return nominal_schedule(self.family.name, block, self.microbatches, self.method, self.vocab_ranks)

    def _check_method(self) -> None:
        if self.method not in self.family.methods:
            own = self.family.own_method
            takes = f"which supports only {own}" if own else f"which supports {', '.join(self.family.methods)}"
            raise UserError(f"vocab method {self.method} cannot be used with schedule {self.family.name}, {takes}")

    def _check_sizes(self) -> None:
        name, ranks, microbatches = self.family.name, self.pipeline_size, self.microbatches
        if self.family.fixed is not None:
            self._check_file(self.family.fixed)
        least = 1 if self.method is VocabMethod.NONE else 2
        if ranks < least:
            raise UserError(
                f"pipeline size {ranks} is too small for {name} with vocab method {self.method}; give at least {least}"
            )
        if microbatches < 1:
            raise UserError(f"{microbatches} microbatches are too few for a schedule; give at least 1")
        chunks = self.chunks if self.family.chunks is None else 1
        if ranks * microbatches * chunks > LARGEST:
            size = f"{ranks} ranks x {microbatches} microbatches" + (f" x {chunks} chunks" if chunks > 1 else "")
            raise UserError(
                f"{size} make more than {LARGEST:,} forward passes, and scheduling these would take minutes and "
                "gigabytes of memory; give fewer microbatches, which show the same steady state"
            )

    def _check_file(self, fixed: Schedule) -> None:
        ranks = f"{fixed.pipeline_size} ranks, but {self.pipeline_size} are requested"
        steps = f"{fixed.microbatches} microbatches, but {self.microbatches} are requested"
        enough = self.forward_only or self.microbatches <= fixed.microbatches
        for has, fits in ((ranks, fixed.pipeline_size == self.pipeline_size), (steps, enough)):
            if not fits:
                raise UserError(f"the schedule in {self.family.name} has {has}; use a file that matches the request")

    def _check_offload(self) -> None:
        name, chunks = self.family.name, self.offload_chunks
        if chunks and self.family.fixed is not None:
            raise UserError(
                f"--offload-chunks cannot be used with the schedule in {name}; add passes O and R to the file instead"
            )
        if not 0 <= chunks <= self.chunks:
            raise UserError(
                f"cannot offload {chunks} chunks with schedule {name}, which has {self.chunks} per rank; set "
                f"--offload-chunks to half, all or a number from 0 to {self.chunks}"
            )

    def _check_vocab_ranks(self) -> None:
        holders, every = self.vocab_ranks, _every_rank(self.family, self.pipeline_size, self.method)
        if holders == every:
            return
        asked, name = f"vocabulary rows on ranks {_listed(holders)}", self.family.name
        if self.family.fixed is not None or not self.method.is_sharded:
            raise UserError(
                f"{asked} cannot be used with schedule {name} and vocab method {self.method}, which have vocabulary "
                f"passes on ranks {_listed(every)}; use these ranks, another schedule or another method"
            )
        if not holders or len(set(holders)) < len(holders) or not set(holders) <= set(every):
            raise UserError(
                f"{asked} are not possible; give at least one of the ranks 0 to {self.pipeline_size - 1}, each at most "
                "once"
            )


def _every_rank(family: Family, pipeline_size: int, method: VocabMethod) -> tuple[int, ...]:
    """All ranks that can have vocabulary rows."""
    if family.fixed is not None:
        return family.fixed.vocab_ranks
    return () if method is VocabMethod.NONE else tuple(range(pipeline_size))


AUTO = "auto"
"""The value of `--offload-chunks` that lets the cost model choose the number of chunks."""


def chunks_to_offload(text: str, chunks: int) -> int:
    """Number of chunks per rank that `--offload-chunks` offloads, given a number, `half` (rounded up) or `all`."""
    named = {"half": (chunks + 1) // 2, "all": chunks}
    if text not in named and not text.isdecimal():
        raise UserError(
            f"--offload-chunks {text!r} is not a number of chunks; give half, all or a number from 0 to {chunks}"
        )
    return named[text] if text in named else int(text)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "none"
