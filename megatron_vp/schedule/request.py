"""Checks a request for a schedule, and generates the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule.costs import Costs, PassCosts
from megatron_vp.schedule.dependencies import returning_at_once
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.graph import Link, gc_paused
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
    forwards, and a schedule file for another number of ranks. In training,
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
    overlapped: bool = False
    """Whether the pairs of a forward and a backward run as one, so that expert communication hides behind computation.
    """

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
        self.family.chunks_of(self.chunks)
        for is_wrong, words in self._defects():
            if is_wrong:
                raise UserError(words)

    @gc_paused()
    def schedule(self) -> Schedule:
        """Generate the complete schedule, including vocabulary passes."""
        fixed = self.family.fixed
        if self.forward_only:
            forward = self._complete() if fixed is None else forwards(fixed, self.microbatches)
            return evaluation(forward, self.costs)
        if fixed is None:
            return replace(self._complete(), shape=self.family.shape)
        schedule = fixed.first_microbatches(self.microbatches)
        return schedule if self.overlapped else replace(schedule, pairs=())

    def _complete(self) -> Schedule:
        nominal = self.placed()
        return nominal.schedule if self.family.order else self._tightened(nominal, self.limits(nominal.schedule))

    def limits(self, nominal: Schedule) -> MemoryLimits:
        """The memory limits of the search for shorter orders, which starts from the schedule `nominal`."""
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
        links: list[Link] = []
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
        sizes = self.chunks, self.microbatches, self.method, self.overlapped
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
            return Nominal(schedule, ((),) * self.pipeline_size, spans, busiest / self.microbatches)
        make = self.family.overlapped if self.overlapped else self.family.block
        assert make is not None
        # Nominal times only determine the order of passes, so mean costs over ranks and stages are precise enough. The
        # block's forwards include the vocabulary work, so that the nominal times leave time for this work.
        mean = self.costs.nominal(self.pipeline_size)
        work = mean.S + mean.T + mean.IF + mean.IB if self.method.is_sharded else 0.0
        block = make(self.pipeline_size, self.chunks, replace(mean, F=mean.F + work).without_zeros())
        return nominal_schedule(self.family.name, block, self.microbatches, self.method, self.vocab_ranks)

    def _defects(self) -> Iterator[tuple[bool, str]]:
        """Conditions under which the request cannot be met, each with the reason and the remedy."""
        family, ranks, microbatches, method = self.family, self.pipeline_size, self.microbatches, self.method
        name, fixed, holders = family.name, family.fixed, self.vocab_ranks
        yield (
            method not in family.methods,
            f"vocab method {method} cannot be used with schedule {name}, which supports {', '.join(family.methods)}",
        )
        if fixed is not None:
            fits = fixed.pipeline_size == ranks and (self.forward_only or microbatches <= fixed.microbatches)
            yield (
                not fits,
                f"the schedule in {name} has {fixed.pipeline_size} ranks and {fixed.microbatches} microbatches, but "
                f"{ranks} and {microbatches} are requested; use a file that matches the request",
            )
        least = 1 if method is VocabMethod.NONE and not self.overlapped else 2
        yield (
            ranks < least,
            f"pipeline size {ranks} is too small for {name} with vocab method {method}; give at least {least}",
        )
        yield (
            self.overlapped and not family.has_pairs,
            f"schedule {name} has no pairs of a forward and a backward that can run as one; use interleaved or "
            "dualpipe-v",
        )
        yield (
            self.overlapped and bool(self.offload_chunks),
            "activations of passes that run as one cannot be offloaded; leave out --offload-chunks or the pairs",
        )
        yield microbatches < 1, f"{microbatches} microbatches are too few for a schedule; give at least 1"
        chunks = self.chunks if family.chunks is None else 1
        yield (
            ranks * microbatches * chunks > LARGEST,
            f"{ranks} ranks x {microbatches} microbatches x {self.chunks} chunks make more than {LARGEST:,} forward "
            "passes, and scheduling these would take minutes and gigabytes of memory; give fewer microbatches, which "
            "show the same steady state",
        )
        every = _every_rank(family, ranks, method)
        some = fixed is None and method.is_sharded and holders and {*holders} <= {*every}
        yield (
            holders != every and not (some and len({*holders}) == len(holders)),
            f"vocabulary rows on ranks {_listed(holders)} cannot be used with schedule {name} and vocab method "
            f"{method}, which have vocabulary passes on ranks {_listed(every)}; use these ranks or, with vocab-1 and "
            "vocab-2 of a generated schedule, at least one of them, each at most once",
        )
        yield (
            bool(self.offload_chunks and fixed),
            f"--offload-chunks cannot be used with the schedule in {name}; add passes O and R to the file instead",
        )
        yield (
            not 0 <= self.offload_chunks <= self.chunks,
            f"cannot offload {self.offload_chunks} chunks with schedule {name}, which has {self.chunks} per rank; set "
            f"--offload-chunks to half, all or a number from 0 to {self.chunks}",
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
