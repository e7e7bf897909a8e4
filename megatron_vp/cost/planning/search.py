"""Finds the parallel sizes, schedule and vocabulary method that train fastest on given GPUs, and alternatives that are
slower but need less memory.

Every combination gets a lower bound on its time, and one on its memory as a function of its time (`bounds`). The first
round simulates combinations that are expected to improve the frontier of time and memory. The second round simulates
each remaining combination whose bounds allow an improvement. A combination is skipped if its bounds show that a
simulated combination beats it in both time and memory. The third round finds the fastest runs without vocabulary
parallelism, for comparison. Next, if requested, the search also tries runs that offload activations to host memory
(`offloading`). Finally, with the parallel sizes of the job itself and of the fastest run, flexible schedules are
fitted to the available memory.

The result does not depend on the machine, its cores or its load: the budget is a number of simulations, and each
decision to simulate uses the results of all earlier simulations except the last WINDOW.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_vp.cost.balance.balanced import balanced
from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.planning.balanced_bounds import balanced_bound, bounds_of_choices
from megatron_vp.cost.planning.candidates import LARGEST, MOST_BALANCED, PLAIN, REDISTRIBUTED, Candidate, candidates
from megatron_vp.cost.planning.evaluation import Evaluation, evaluate
from megatron_vp.cost.planning.flexible import fitted_evaluations
from megatron_vp.cost.planning.front import SLOWEST, Front, frontier, time_and_memory
from megatron_vp.cost.planning.offloading import bases_to_offload, offloaded_runs, sizes_to_offload
from megatron_vp.cost.planning.planner import near_fastest, simplicity
from megatron_vp.cost.planning.variants import Variant, is_neighbour
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.cost.prediction.bounds import Bound, bound
from megatron_vp.cost.sizes.shapes import Job, Plan, Recompute
from megatron_vp.errors import UserError
from megatron_vp.schedule import VocabMethod

BUDGET = 250
"""Default limit on the number of simulations that `search` counts against its `budget`."""

BALANCED = 4
"""A combination with balanced shards counts as this many simulations, because balancing its shards takes several."""

COMPARED = 48
"""Each of the two searches in `_Running.compare` simulates at most this many combinations."""

TOGETHER = 4
"""The number of simulations that `_Running.compare` starts together."""

WINDOW = 16
"""The largest number of simulations in progress at once, and therefore of cores in use."""


@dataclass(frozen=True)
class Search:
    """The results of a search.

    found: simulated combinations, fastest first.
    too_large: number of combinations whose lower bound on memory exceeds the limit.
    dominated: number of combinations that a simulated one beats, that cannot run, or that equal another combination.
    untried: number of combinations that may be on the frontier but were not simulated, because the `budget` of
        simulations was used up.
    untried_seconds: lower bound on the iteration time of the untried combinations.
    offload_sizes: number of combinations of parallel sizes for which offloading was tried; None: not requested.
    likely: number of untried combinations that are expected to be on the frontier.
    compared: further simulated runs without vocabulary parallelism, none of which is on the frontier. They are not in
        `found`; `dominated` counts them.
    """

    variants: Sequence[Variant]
    found: Sequence[Evaluation]
    too_large: int
    dominated: int
    budget: int = BUDGET
    untried: int = 0
    untried_seconds: float = math.inf
    offload_sizes: int | None = None
    likely: int = 0
    compared: Sequence[Evaluation] = ()

    @property
    def count(self) -> int:
        """Number of combinations."""
        return len(self.found) + self.too_large + self.dominated + self.untried

    def tied(self, limit: float, band: float = ERROR_BAND["time"]) -> list[Evaluation]:
        """Runs that fit in memory and are within `band` of the fastest (see `ties.tie_of`).

        Runs whose free memory exceeds the error of predicted memory precede all others. In both groups, simpler runs
        come first.
        """

        def simplest(each: Evaluation) -> tuple[float, ...]:
            job = self.variants[each.variant].job
            recomputes = job.recompute is not Recompute.NONE
            return each.is_tight(limit), job.context, recomputes, job.tensor, job.expert, *simplicity(each)

        return sorted(near_fastest(self.fitting(limit), band), key=simplest)

    def fitting(self, limit: float) -> list[Evaluation]:
        """Runs that need at most `limit` bytes per rank, fastest first."""
        return [each for each in self.found if each.fits(limit)]

    def without_split(self, limit: float) -> list[Evaluation]:
        """Runs in `found` or `compared` that have no vocabulary parallelism and stay within `limit`, fastest first."""
        runs = [each for each in [*self.found, *self.compared] if each.candidate.without_split and each.fits(limit)]
        return sorted(runs, key=lambda each: each.iteration_seconds)

    def frontier(self, limit: float) -> list[Evaluation]:
        """Runs within `limit` that no other run beats in both time and memory, fastest first.

        Runs that take more than SLOWEST times as long as the fastest run are left out.
        """
        best = frontier(self.fitting(limit))
        return [each for each in best if each.iteration_seconds <= SLOWEST * best[0].iteration_seconds]


def search(
    tried: Sequence[Variant],
    hardware: Hardware,
    limit: float,
    budget: int = BUDGET,
    chunks: int = 2,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    offload: bool = False,
) -> Search:
    """Simulate the combinations of parallel sizes, schedule and vocabulary method that fit `limit` and may be on the
    frontier of time and memory.

    Args:
        budget: the largest number of simulations, not counting those with the job's own parallel sizes and those of
            `_Running.compare`, `offloaded` and `fitted`.
        chunks: chunks per rank in schedules that allow any number, such as `interleaved`.
        progress: called with the name of the current step, the number of its tasks that are done, and their total.
        offload: whether to also try offloading activations to host memory, with the job's own parallel sizes and a few
            other combinations of sizes.

    Raises UserError if nothing fits.
    """
    with worker_pool(min(WINDOW, len(os.sched_getaffinity(0)))) as pool:
        running = _Running(pool, tried, hardware, chunks, progress, Front(limit), budget)
        return running.search(budget, offload)


@dataclass
class _Running:
    """A search, its workers, and what it has found so far. At most WINDOW simulations run at once; their results are
    added to `front` and `found` in the order of submission.
    """

    pool: ProcessPoolExecutor
    tried: Sequence[Variant]
    hardware: Hardware
    chunks: int
    progress: Callable[[str, int, int], None]
    front: Front
    left: int
    """Simulations that the budget still allows."""
    found: list[Evaluation] = field(default_factory=list)
    waits: deque[tuple[_Option, Future]] = field(default_factory=deque)

    def search(self, budget: int, offload: bool) -> Search:
        tried, front, found, limit = self.tried, self.front, self.found, self.front.limit
        asked = self.hardware, self.chunks
        listed = [self.pool.submit(_options, index, each, *asked) for index, each in enumerate(tried)]
        for done, _ in enumerate(as_completed(listed), start=1):
            self.progress("bounds", done, len(listed))
        options = sorted(option for future in listed for option in future.result())
        fitting = [option for option in options if option.bound.memory <= limit]
        waiting = _by_turns(fitting, tried)
        for step, may_gain in (("simulating", front.expects), ("simulating others", front.may_gain)):
            turns, waiting = waiting, []
            for done, option in enumerate(turns):
                self.progress(step, done, len(turns))
                if may_gain(option.bound) and self.room(option) and may_gain(option.bound):
                    self.start(option)
                else:
                    waiting.append(option)
            while self.waits:
                self.take()
        waiting, compared = self.compare(waiting)
        simulated, sizes = len(found), None
        if offload:
            sizes = self.sizes_to_offload(options)
            found += self.offloaded(sizes)
        found += self.fitted(offload)
        found.sort(key=_order)
        untried = [option for option in waiting if front.may_gain(option.bound)]
        result = Search(
            tried,
            found,
            len(options) - len(fitting),
            len(fitting) - simulated - len(untried),
            budget,
            len(untried),
            min((option.bound.seconds for option in untried), default=math.inf),
            None if sizes is None else len(sizes),
            sum(front.expects(option.bound) for option in untried),
            compared,
        )
        if not result.fitting(limit):
            raise UserError(_nothing_fits(limit, found, options, result))
        return result

    def submit(self, option: _Option) -> Future:
        """Let a worker evaluate `option` (see `_evaluation`)."""
        job = self.tried[option.variant].job
        return self.pool.submit(_evaluation, option, job, self.hardware, self.front)

    def start(self, option: _Option) -> None:
        self.waits.append((option, self.submit(option)))
        self.spend(option, BALANCED if option.balanced else 1)

    def room(self, option: _Option) -> bool:
        """Wait until another simulation may start; return whether the budget allows `option`."""
        own = self.tried[option.variant].own
        while len(self.waits) >= WINDOW or (self.waits and not own and self.left <= 0):
            self.take()
        return own or self.left > 0

    def spend(self, option: _Option, simulations: int) -> None:
        if not self.tried[option.variant].own:
            self.left -= simulations

    def take(self) -> None:
        option, future = self.waits.popleft()
        evaluation = future.result()
        if evaluation is None:
            self.spend(option, 1 - BALANCED if option.balanced else -1)
        else:
            self.found.append(evaluation)
            self.front.add(*time_and_memory(evaluation))

    def sizes_to_offload(self, options: Sequence[_Option]) -> list[int]:
        """Indices of the variants for which to try offloading: the job's own, and others that offloading may bring onto
        the frontier of time and memory.
        """
        offloadable = [each.job.pipeline > 1 and each.job.recompute is Recompute.NONE for each in self.tried]
        own = [index for index, each in enumerate(self.tried) if each.own and offloadable[index]]
        least = [(each.bound.without_activations, each.variant) for each in options if offloadable[each.variant]]
        return list(dict.fromkeys([*own, *sizes_to_offload(each for each in least if self.front.may_gain(each[0]))]))

    def offloaded(self, sizes: Sequence[int]) -> list[Evaluation]:
        """Evaluate runs that offload chunks, for the variants with these indices."""
        jobs, pool, hardware = [each.job for each in self.tried], self.pool, self.hardware
        bases = [(index, pool.submit(bases_to_offload, jobs[index], hardware, self.chunks)) for index in sizes]
        running = [
            (index, pool.submit(offloaded_runs, base, jobs[index], hardware, self.front.limit))
            for index, future in bases
            for base in future.result()
        ]
        known, made = {(each.variant, each.candidate) for each in self.found}, []
        for done, (index, future) in enumerate(running, start=1):
            made += [replace(each, variant=index) for each in future.result() if (index, each.candidate) not in known]
            self.progress("offloading", done, len(running))
        return made

    def fitted(self, offload: bool) -> list[Evaluation]:
        """Fit flexible schedules to the limit, and evaluate them. Use the parallel sizes of the job itself, and those
        of the fastest run that stays within the limit.
        """
        limit, tried = self.front.limit, self.tried
        fastest = [each.variant for each in sorted(self.found, key=_order) if each.fits(limit)][:1]
        chosen = list(dict.fromkeys([index for index, each in enumerate(tried) if each.own] + fastest))
        self.progress("fitting", 0, len(chosen))
        jobs = [tried[index].job for index in chosen]
        evaluations = fitted_evaluations(self.pool, jobs, self.hardware, limit, offload)
        return [replace(each, variant=index) for index, made in zip(chosen, evaluations, strict=True) for each in made]

    def compare(self, waiting: Sequence[_Option]) -> tuple[list[_Option], list[Evaluation]]:
        """Search for the fastest run that fits, once among runs that Megatron itself supports, and once among runs
        without vocabulary parallelism. In each search, simulate options until no other option can be faster.

        The most promising options come first, and each search simulates at most COMPARED of them. Runs that improve the
        front are added to `front` and `found`. Returns the remaining options, and the simulated runs that do not
        improve the front.
        """
        front, found, left, others = self.front, self.found, list(waiting), list[Evaluation]()
        for kind in ("in_megatron", "without_split"):
            fitting = [each for each in [*found, *others] if each.fits(front.limit) and getattr(each.candidate, kind)]
            best = min((each.iteration_seconds for each in fitting), default=math.inf)
            turns = sorted(
                (option for option in left if getattr(option.candidate, kind)),
                key=lambda option: (option.bound.expected > front.limit, option),
            )
            for done in range(0, COMPARED, TOGETHER):
                self.progress("comparing", done, COMPARED)
                turns = [
                    option
                    for option in turns
                    if option.bound.seconds < best and option.bound.memory_within(best) <= front.limit
                ]
                batch, turns = turns[:TOGETHER], turns[TOGETHER:]
                running = list(map(self.submit, batch))
                for option, future in zip(batch, running, strict=True):
                    left.remove(option)
                    run = future.result()
                    if run is None:
                        continue
                    point = time_and_memory(run)
                    front.add(*point)
                    (found if point in front.points else others).append(run)
                    if run.fits(front.limit):
                        best = min(best, run.iteration_seconds)
            self.progress("comparing", COMPARED, COMPARED)
        return left, others


def _nothing_fits(limit: float, found: Sequence[Evaluation], options: Sequence[_Option], result: Search) -> str:
    here = f"{limit / 2**30:.4g} GiB per rank on these GPUs"
    if result.untried:
        return (
            f"none of the {len(found)} runs simulated within --search-budget {result.budget} fits into {here}, but "
            f"{result.untried} others may: give a larger --search-budget"
        )
    if found:
        needs = f"the smallest needs {min(each.peak_memory for each in found) / 2**30:.1f} GiB"
    else:
        least = max(limit, min((each.bound.memory for each in options), default=limit))
        needs = f"every run needs more than {least / 2**30:.1f} GiB"
    return f"no run fits into {here}: {needs}; use more or larger GPUs"


def _by_turns(options: Sequence[_Option], tried: Sequence[Variant]) -> list[_Option]:
    """Reorder options that are sorted by their lower bounds on time. First come all options with the job's own sizes,
    then the first option of each variant with similar sizes (see `is_neighbour`), then all others.
    """
    own = next((index for index, each in enumerate(tried) if each.own), None)
    if own is None:
        return list(options)
    first = [option for option in options if option.variant == own]
    near = {index for index, each in enumerate(tried) if is_neighbour(each.job, tried[own].job)}
    best: dict[int, _Option] = {}
    for option in options:
        if option.variant in near:
            best.setdefault(option.variant, option)
    return list(dict.fromkeys([*first, *best.values(), *options]))


def _order(run: Evaluation) -> tuple[float, ...]:
    return *time_and_memory(run), run.variant


class _Option(NamedTuple):
    """A combination of parallel sizes, schedule and vocabulary method. Options are sorted by their lower bounds on
    iteration time.

    balanced: whether layers and rows are chosen later, by `balance.balanced`.
    """

    bound: Bound
    variant: int
    place: int
    balanced: bool
    candidate: Candidate


def _evaluation(option: _Option, job: Job, hardware: Hardware, front: Front) -> Evaluation | None:
    """Evaluate an option, or return None if it cannot run. A balanced option also gives None if it cannot improve the
    front or if its shards stay even.
    """
    candidate = option.candidate
    try:
        if option.balanced:
            plan = candidate.plan
            if not any(map(front.may_gain, bounds_of_choices(plan, job, hardware, front.limit))):
                return None
            candidate = replace(candidate, plan=balanced(job, plan, hardware, front.limit).plan(plan))
            if candidate.plan.vocab_rows is None:
                return None
        return replace(evaluate(candidate, job, hardware), variant=option.variant)
    except UserError:
        return None


def _options(variant: int, what: Variant, hardware: Hardware, chunks: int) -> list[_Option]:
    """The options of one variant: all schedules except `interlaced`, which exists only for comparison.

    They include balanced shards if the variant is the job as configured, or if the layers do not divide equally among
    the stages.
    """
    job = what.job
    if job.pipeline == 1:
        tried = [Candidate(PLAIN, Plan())]
    elif job.pipeline > min(LARGEST, job.model.layers):
        tried = []  # Only the job itself can set a pipeline size this large. `candidates` would refuse it.
    else:
        tried = [each for each in candidates(job, hardware, chunks) if each.plan.vocab is not VocabMethod.INTERLACED]
    found = []
    for place, candidate in enumerate(tried):
        plan = candidate.plan
        if 0 in (plan.layers or ()) and candidate.method != REDISTRIBUTED:
            continue  # `evaluate` would refuse stages without layers.
        try:
            even = bound(plan, job, hardware)
            found.append(_Option(even, variant, place, False, candidate))
            if plan.vocab.is_sharded and (what.own or plan.layers is not None) and job.pipeline <= MOST_BALANCED:
                closest = replace(balanced_bound(plan, job, hardware), expected=even.expected)
                found.append(_Option(closest, variant, place, True, candidate))
        except UserError:
            continue
    return found
