"""Predicts the ways to train a job: all schedules and vocabulary methods with its own parallel sizes and, in a search,
those that may be fastest or smallest with other parallel sizes.

Every run with other sizes or with offloaded chunks gets a lower bound on its time, and one on its memory as a function
of its time (`bounds`). The first round simulates runs that are expected to improve the frontier of time and memory. The
second round simulates the remaining runs whose bounds allow an improvement. The third round finds the fastest run that
Megatron itself supports, for comparison. Finally, flexible schedules are fitted to the available memory.

The result does not depend on the machine, its cores or its load: the budget is a number of simulations, and each
decision to simulate uses the results of all simulations up to the last TOGETHER.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.balanced import balanced, least_of_all
from megatron_vp.cost.planning.bounds import SLOWEST, Bound, Front, HeldBytes, bound, frontier, time_and_memory
from megatron_vp.cost.planning.candidates import MOST_BALANCED, candidates, refusal
from megatron_vp.cost.planning.choice import Verdict, judge
from megatron_vp.cost.planning.offloading import fits_host, fitted_evaluation, offloaded
from megatron_vp.cost.planning.predict import Prediction, evaluate
from megatron_vp.cost.planning.variants import Variant
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.errors import UserError
from megatron_vp.schedule import FAMILIES, VocabMethod

BUDGET = 250
"""Default limit on the number of simulations that a search counts against its `budget`."""

BALANCED = 4
"""A run whose shards are balanced counts as this many simulations, because balancing its shards takes several."""

COMPARED = 48
"""At most this many simulations look for the run to compare with, and as many try other plans with its sizes."""

TOGETHER = 8
"""The number of simulations that start together, and therefore of cores in use."""


class Option(NamedTuple):
    """A run that may be simulated: a plan for the parallel sizes of a variant. Options are sorted by their lower bounds
    on iteration time. `place` orders the plans of a variant.
    """

    bound: Bound
    variant: int
    place: int
    plan: Plan


@dataclass
class Search:
    """A comparison of the ways to train a job, and its results so far.

    tried: combinations of parallel sizes. All schedules and methods are simulated with the job's own sizes.
    limit: bytes per rank. Within it, shards are balanced and flexible schedules are fitted.
    budget: the largest number of simulations, not counting those with the job's own parallel sizes and those for
        comparison and flexible schedules.
    chunks: chunks per rank in schedules that allow any number, such as `interleaved`.
    offload: whether to also try offloading activations to host memory.
    given: the job and the plan that its configuration describes; this run is always simulated.
    flagged: plans of that job with flags of ours, which are always simulated, too.
    earlier: a search that differs only in its limit; its bounds and simulations are used again.
    arguments: the job's arguments; runs that refuse one of them are left out (see `refusal`).
    progress: called with the name of the current step, the number of its tasks that are done, and their total.
    found: simulated runs, fastest first.
    impossible: plans that the job cannot run with its own sizes, each with the reason.
    count: number of ways to train.
    untried: runs that may be on the frontier but were not simulated, because the budget was used up.
    """

    tried: Sequence[Variant]
    hardware: Hardware
    limit: float
    budget: float = BUDGET
    chunks: int = 2
    offload: bool = False
    given: tuple[Job, Plan] | None = None
    flagged: Sequence[Plan] = ()
    earlier: Search | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[str, int, int], None] = lambda what, done, of: None
    found: list[Prediction] = field(default_factory=list)
    impossible: list[tuple[Plan, str]] = field(default_factory=list)
    count: int = 0
    untried: list[Option] = field(default_factory=list)

    pool: Executor = field(init=False, repr=False)
    options: list[Option] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.front, self.spent = Front(self.limit), 0
        self.own = [each for each in self.tried if not each.settings]

    def run(self) -> Search:
        """Simulate what is worth it, and return this object."""
        with worker_pool(min(TOGETHER, len(os.sched_getaffinity(0)))) as self.pool:
            self._simulate("predicting", self._own_options())
            if not self.found and len(self.tried) == len(self.own) and self.impossible:
                raise UserError(f"no schedule can run this job: {self.impossible[0][1]}")
            options, left = self._bounded(), list[Option]()
            self.count = len(self.found) + len(options)
            for away in (False, True):
                turns = [option for option in options if bool(option.plan.offload_chunks) is away]
                until = self.spent + self.budget
                for gains in (self.front.expects, self.front.may_gain):
                    turns = self._simulate("simulating", turns, partial(_gains, gains), until)
                left += turns
            for wanted in (self._may_lead, self._may_beat_megatron):
                left = self._simulate("comparing", left, wanted, self.spent + COMPARED)
            self.untried = [option for option in left if self.front.may_gain(option.bound)]
            self._fit()
        self.found.sort(key=time_and_memory)
        return self

    @property
    def fitting(self) -> list[Prediction]:
        """Runs that need at most `limit` bytes per rank, fastest first."""
        return [each for each in self.found if each.fits(self.limit)]

    @property
    def frontier(self) -> list[Prediction]:
        """Runs within the limit that no other run beats in both time and memory, fastest first.

        Runs that take more than SLOWEST times as long as the fastest run are left out.
        """
        best = frontier(each for each in self.fitting if each.plan.vocab is not VocabMethod.INTERLACED)
        return [each for each in best if each.iteration_seconds <= SLOWEST * best[0].iteration_seconds]

    @cached_property
    def verdict(self) -> Verdict:
        """The recommended run, compared with Megatron's own best. Raises UserError if nothing fits."""
        return judge(self.found, self.limit)

    def _own_options(self) -> list[Option]:
        plans = [
            (index, plan)
            for index, each in enumerate(self.tried)
            if not each.settings
            for plan in candidates(each.job, self.hardware, self.chunks, self.offload)
        ]
        if self.given is not None:
            job, own = self.given
            known = [(self.tried[index].job, plan) for index, plan in plans]
            if more := [
                (len(self.tried), each) for each in dict.fromkeys((own, *self.flagged)) if (job, each) not in known
            ]:
                plans += more
                self.tried = [*self.tried, Variant(job, {})]
        return [Option(Bound(0.0, 0.0), index, place, plan) for place, (index, plan) in enumerate(plans)]

    def _bounded(self) -> list[Option]:
        """All options with other sizes than the job's own or with offloaded chunks: those that probably fit first, then
        by their bounds.
        """
        if self.earlier is None:
            tried = [(index, each) for index, each in enumerate(self.tried) if self.offload or each.settings]
            listed = [
                self.pool.submit(bounded_options, index, each, self.hardware, self.chunks, self.offload)
                for index, each in tried
            ]
            for done, _ in enumerate(as_completed(listed), start=1):
                self.progress("bounds", done, len(listed))
            self.options = [option for future in listed for option in future.result()]
        else:
            self.options = self.earlier.options
        return sorted(self.options, key=lambda option: (option.bound.expected > self.limit, option))

    def _simulate(
        self,
        what: str,
        options: Sequence[Option],
        wanted: Callable[[Option], bool] = lambda option: True,
        until: float = math.inf,
    ) -> list[Option]:
        """Simulate options in turn, TOGETHER at once, if they are `wanted` when it is their turn and if fewer than
        `until` simulations have been counted. Return the others.
        """
        turns, left = deque(options), list[Option]()
        together = TOGETHER if until < math.inf else len(options)
        known = {(each.job, each.plan): each for each in (self.earlier.found if self.earlier else ())}
        while turns and self.spent < until:
            batch: list[tuple[Option, Future[list[Prediction] | str]]] = []
            while turns and self.spent < until and len(batch) < together:
                option = turns.popleft()
                variant, plan = self.tried[option.variant], option.plan
                if not wanted(option):
                    left.append(option)
                elif self.arguments and (reason := refusal({**self.arguments, **variant.settings}, plan)):
                    self._settle(option, reason)
                else:
                    found, costs = Future[list[Prediction] | str](), BALANCED if is_balanced(plan, variant.job) else 1
                    if costs == 1 and (again := known.get((variant.job, plan))):
                        found.set_result([again])
                    else:
                        found = self.pool.submit(evaluations, plan, variant.job, self.hardware, self.limit)
                    batch.append((option, found))
                    self.spent += costs
            for done, (option, future) in enumerate(batch, start=len(options) - len(turns) - len(batch) + 1):
                self._settle(option, future.result())
                self.progress(what, done, len(options))
        return [*left, *turns]

    def _settle(self, option: Option, found: Sequence[Prediction] | str) -> None:
        """Note an option's simulated runs, or the reason why the job cannot run it with its own sizes."""
        settings = self.tried[option.variant].settings
        if not isinstance(found, str):
            self._add(found, settings)
        elif not settings:
            self.impossible.append((option.plan, found))

    def _add(self, found: Sequence[Prediction], settings: Mapping[str, Any]) -> None:
        """Add simulated runs that are not known yet."""
        known = {(each.job, each.plan) for each in self.found}
        for each in found:
            if (each.job, each.plan) not in known:
                each.settings, each.given = settings, (each.job, each.plan) == self.given
                self.found.append(each)
                if each.plan.vocab is not VocabMethod.INTERLACED:
                    self.front.add(*time_and_memory(each))

    @property
    def _rival(self) -> Prediction | None:
        return min((each for each in self.fitting if each.plan.in_megatron), key=time_and_memory, default=None)

    def _may_beat_megatron(self, option: Option) -> bool:
        """Whether an option may be better than the fastest run that Megatron itself supports, with the same sizes."""
        rival = self._rival
        return rival is not None and self.tried[option.variant].job == rival.job and self.front.may_gain(option.bound)

    def _may_lead(self, option: Option) -> bool:
        """Whether an option may be the fastest run that Megatron itself supports."""
        rival, least = self._rival, option.bound
        best = rival.iteration_seconds if rival else math.inf
        return option.plan.in_megatron and least.seconds < best and least.memory_within(best) <= self.limit

    def _fit(self) -> None:
        """Fit flexible schedules to the limit where their largest base does not fit but another run with the same sizes
        and vocabulary method does: with the job's own sizes, and with those of the fastest run that fits.
        """
        fitting = {(each.job, each.plan.vocab) for each in self.fitting}
        flexible = {record.bases[0].name: record.name for record in FAMILIES.values() if record.bases}
        jobs = [each.job for each in self.own] + [each.job for each in sorted(self.fitting, key=time_and_memory)[:1]]
        running = [
            (each, self.pool.submit(fitted_evaluation, replace(each.plan, schedule=flexible[name]), each, self.limit))
            for each in self.found
            if (name := each.plan.schedule) in flexible and each.job in jobs and (each.job, each.plan.vocab) in fitting
            if not each.fits(self.limit) and each.job.pipeline <= MOST_BALANCED
            if not each.plan.offload_chunks and not each.plan.vocab_rows
        ]
        for largest, future in running:
            self._add(future.result(), largest.settings)


def is_balanced(plan: Plan, job: Job) -> bool:
    """Whether a plan is also evaluated with balanced shards: if its layers do not divide equally."""
    uneven = plan.layers is not None and not plan.offload_chunks
    return plan.vocab.is_sharded and uneven and job.pipeline <= MOST_BALANCED


def evaluations(plan: Plan, job: Job, hardware: Hardware, limit: float) -> list[Prediction] | str:
    """Evaluate a plan and, if `balanced` chooses uneven shards for it, also with these. Return the reason if the job
    cannot run the plan.
    """
    try:
        plans = [plan]
        if is_balanced(plan, job) and plan.vocab_rows is None:
            assigned = balanced(job, plan, hardware, limit)[0]
            plans += [assigned] if assigned.vocab_rows is not None else []
        return [found for each in plans if fits_host(found := evaluate(each, job, hardware))]
    except UserError as error:
        return str(error)


def bounded_options(index: int, variant: Variant, hardware: Hardware, chunks: int, offload: bool) -> list[Option]:
    """The options of one variant, without those that are simulated in any case: all schedules except `interlaced`,
    which exists only for comparison.
    """
    job, found = variant.job, list[Option]()
    for base in candidates(job, hardware, chunks, offload):
        if base.vocab is VocabMethod.INTERLACED:
            continue
        try:
            away = offloaded(base, job, hardware) if offload else []
            for plan in [base, *away] if variant.settings else away:
                least = bound(plan, job, hardware)
                if is_balanced(plan, job):
                    least = _of_any_shards(least, least_of_all(job, plan, hardware))
                found.append(Option(least, index, len(found), plan))
        except UserError:
            continue
    return found


def _of_any_shards(even: Bound, seconds: float) -> Bound:
    """Bounds for all shards that `balanced` may choose, given those for even shards. Moving layers and rows leaves the
    ranks' mean memory about the same.
    """
    count = len(even.ranks)
    always, byte_seconds = (
        sum(getattr(rank, name) for rank in even.ranks) / count for name in ("always", "byte_seconds")
    )
    idle = min(rank.idle for rank in even.ranks)
    ranks = (HeldBytes(always, byte_seconds, idle),)
    return replace(even, seconds=min(seconds, even.seconds), memory=min(always, even.memory), ranks=ranks)


def _gains(front: Callable[[Bound], bool], option: Option) -> bool:
    return front(option.bound)
