"""Chooses the vocabulary rows of each rank and the layers of each stage to balance the ranks' work.

A layer cannot be split between ranks, but vocabulary rows can, so ranks with fewer layers get more rows. Rows are
assigned for several divisions of the layers (`layer_division`). The most promising ones are simulated with the job's
schedule, and the fastest is kept. All GPUs count as equally fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, product

from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.bounds import ROUNDING, bound
from megatron_vp.cost.planning.layer_division import divisions, fill, layer_seconds
from megatron_vp.cost.planning.predict import Prediction, evaluate, make_simulator
from megatron_vp.cost.planning.samples import sampled
from megatron_vp.cost.planning.stage_costs import layers_of, single_microbatch, stage_times
from megatron_vp.cost.ranks.pass_times import PassTimes, Split
from megatron_vp.cost.ranks.rank_memory import MemoryModel
from megatron_vp.errors import UserError
from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.schedule import Schedule, VocabMethod, family
from megatron_vp.schedule.graph import gc_paused

EVEN_BAND = 0.01
"""Even shards are kept if training with them is predicted to be at most this fraction slower than with the best shards.
"""

UNITS = (128, 64, 8)
"""Units in which rows may be assigned; `unit_of_rows` picks the largest that fits at least FINE_ENOUGH times into an
even shard. GEMMs are fastest with multiples of 128 rows. Multiples of 64 rows align the 16-bit logits of every token to
128 bytes, and multiples of 8 rows align them to 16 bytes.
"""

FINE_ENOUGH = 16

SMALLEST_SHARE = 1 / 16
"""Smallest non-empty shard, as a fraction of an even shard; a smaller one is not worth the overhead of its passes."""

TIE = 0.002
"""A candidate ties with the fastest if it is slower by at most this fraction. Of the tied candidates, the one that
needs least memory is chosen.
"""


@gc_paused()
def best_shards(
    job: Job, plan: Plan, hardware: Hardware, limit: float, layout_given: bool = False
) -> tuple[Plan, float]:
    """As `balanced`, but without vocabulary parallelism if shards would gain neither time nor memory.

    A whole run keeps the plan's schedule and layers. If neither it nor shards fit into `limit` bytes, it is taken to
    fit, and shards may need as much memory, up to the error of predictions. On CPU hardware, whose times are known only
    to an order of magnitude, the vocabulary layers are always split. Raises UserError like `balanced`.
    """
    if not hardware.is_gpu:
        return balanced(job, plan, hardware, limit, layout_given)
    try:
        whole = evaluate(replace(plan, vocab=VocabMethod.NONE, vocab_rows=None), job, hardware)
    except UserError:  # Only with shards can this job run.
        return balanced(job, plan, hardware, limit, layout_given)
    limits = [limit] if whole.fits(limit) else [limit, (1 + ERROR_BAND["memory"]) * whole.peak_memory]
    for most, band in product(limits, (EVEN_BAND, 0.0)):
        found, gain = balanced(job, plan, hardware, most, layout_given, band)
        split = evaluate(found, job, hardware)
        least = TIE if split.peak_memory >= whole.peak_memory else 0.0
        gains = split.iteration_seconds <= (1 - least) * whole.iteration_seconds
        if split.fits(most) and (gains or not whole.fits(most)):  # Where whole layers do not fit, memory is the gain.
            return found, gain
    return whole.plan, 1.0


@gc_paused()
def balanced(
    job: Job,
    plan: Plan,
    hardware: Hardware,
    memory_limit: float | None = None,
    layout_given: bool = False,
    band: float = EVEN_BAND,
) -> tuple[Plan, float]:
    """Return `plan` (vocab-1 or vocab-2) with the layers and rows with which it is predicted to be fastest within
    `memory_limit`, and its speed-up over even shards in the user's layout or, if there is none, training's own.

    Args:
        plan: its `vocab_rows` are ignored.
        memory_limit: bytes per rank; None: unlimited. The limit is ignored on CPU hardware, and if it cannot be met.
        layout_given: whether the user set the plan's layers; if so, only rows are assigned.
        band: even shards are kept if they are predicted to be at most this fraction slower than the best shards.

    The result is deterministic: all ranks of a job compute the same layers and rows. Even shards are also kept
    if the method, the schedule or the vocabulary size rules out uneven shards. On CPU hardware, whose times are known
    only to an order of magnitude, even shards are also kept if all stages have equally many layers. Raises UserError if
    the layers cannot be distributed over the stages.
    """
    plan = replace(plan, vocab_rows=None) if layout_given else replace(plan, vocab_rows=None, layers=None)
    search = _Search(job, plan, hardware, memory_limit if hardware.is_gpu else None)
    even = search.even
    if not plan.vocab.is_sharded or search.unit is None or not (hardware.is_gpu or even.layers):
        return even, 1.0
    first = search.predict(even)
    # If the even shards fit, they are kept unless another plan takes at most `longest` seconds. No plan whose lower
    # bound exceeds `longest` is simulated: it is too slow to replace the even shards, or to tie with the fastest plan.
    longest = first.iteration_seconds / (1 + band) if search.fits(first) else math.inf
    if search.least_of_all() > longest:
        return even, 1.0
    found = [first]
    least = {each: search.least(each) for each in search.candidates()}
    for each in sorted(least, key=least.__getitem__):
        if least[each] <= longest:
            found.append(search.predict(each))
            if search.fits(found[-1]):
                longest = min(longest, (1 + TIE) * found[-1].iteration_seconds)
    found = list(filter(search.fits, found)) or found
    fastest = min(each.iteration_seconds for each in found)
    if first in found and first.iteration_seconds <= (1 + band) * fastest:
        return even, 1.0
    tied = (each for each in found if each.iteration_seconds <= (1 + TIE) * fastest)
    best = min(tied, key=lambda each: each.peak_memory)
    return best.plan, first.iteration_seconds / best.iteration_seconds


def least_of_all(job: Job, plan: Plan, hardware: Hardware) -> float:
    """Lower bound in seconds on the iteration time, for any layers and rows that `balanced` may choose.

    The bound is infinite if the schedule or the vocabulary size rules out uneven shards. Raises UserError if the layers
    cannot be distributed over the stages.
    """
    search = _Search(job, replace(plan, vocab_rows=None, layers=None), hardware, None)
    return math.inf if search.unit is None else search.least_of_all()


class _Search:
    """Finds candidate plans for one job. `unit` is None if only even shards are possible."""

    def __init__(self, job: Job, plan: Plan, hardware: Hardware, memory_limit: float | None) -> None:
        self.job, self.plan, self.hardware, self.limit = job, plan, hardware.alike, memory_limit
        self.single, self.times = single_microbatch(plan, job), PassTimes(job, hardware)
        self.placement = self.single.placement
        fixed = family(plan.schedule).fixed is not None
        self.unit = None if fixed else unit_of_rows(job.model.vocab, job.pipeline, job.tensor)
        even = _none_if_equal(even_layers(job.model.layers, self.placement.stages))
        self.even = replace(plan, layers=even if plan.layers is None else plan.layers)
        self.ends_of_memory: dict[tuple[int, tuple[int, ...]], tuple[float, ...]] = {}
        layers_of(job, self.even, self.placement)

    def predict(self, plan: Plan) -> Prediction:
        return evaluate(plan, self.job, self.hardware)

    def fits(self, found: Prediction) -> bool:
        return self.limit is None or found.fits(self.limit)

    def least(self, plan: Plan) -> float:
        """Lower bound on the iteration time, in seconds, if no rank holds more activations than `promised_peak`."""
        return bound(plan, self.job, self.hardware).seconds / (1 + ROUNDING)

    def least_of_all(self) -> float:
        """Lower bound in seconds on the iteration time, however layers and rows are divided among the ranks. It assumes
        that all ranks have the same work, and that every row takes as long as in a shard of the most efficient size.
        """
        stages = self.stage_times(layers_of(self.job, self.even, self.placement))
        rows = (len(self.row_seconds) - 1) * min(took / count for count, took in enumerate(self.row_seconds) if count)
        return self.job.microbatches * (sum(map(sum, stages)) + rows) / self.job.pipeline

    def stage_times(self, layers: tuple[int, ...]) -> list[Split]:
        return stage_times(self.times, self.plan.vocab, layers, self.single.split_backward)

    def candidates(self) -> list[Plan]:
        """The plans worth simulating: of each group of divisions, the one whose busiest rank has the least work."""
        if self.plan.layers is None:
            groups = divisions(layer_seconds(self.times), self.placement, self.cost)
        else:
            p = self.job.pipeline
            counts = sorted({1, p - 1, *(2**power for power in range(p.bit_length()) if 2**power < p)})
            holders = (range(p), *map(range, counts), *(range(p - count, p) for count in counts))
            groups = [[(self.plan.layers, each)] for each in holders]
        assigned = [[plan for division in group if (plan := self.assigned(*division))] for group in groups]
        return list(dict.fromkeys(min(group, key=lambda each: each[1])[0] for group in assigned if group))

    def assigned(self, layers: tuple[int, ...], holders: range) -> tuple[Plan, tuple[float, float]] | None:
        """Assign rows to `holders`; return the plan and its sort key, or None if the rows do not fit.

        The key is a pair: the busiest rank's work, rounded to thousandths of the mean, and the total work of all ranks.
        The last rank that has units of rows also gets the rows that do not fill a unit.
        """
        stages, p = self.stage_times(layers), self.job.pipeline
        work = [sum(sum(stages[stage]) for stage in row) for row in self.placement.stage_of]
        most = [room if rank in holders else 0 for rank, room in enumerate(self.room(layers))]
        while (units := fill(work, self.cost, most)) is not None:
            least = SMALLEST_SHARE * sum(units) / p
            if all(not own or own >= least for own in units):
                assert self.unit is not None
                rows = [self.unit * count for count in units]
                rows[max(rank for rank, count in enumerate(units) if count)] += self.job.model.vocab % self.unit
                if not self.may_predict_further(rows):
                    return None
                loads = [own + self.cost[count] for own, count in zip(work, units, strict=True)]
                plan = replace(self.plan, layers=_none_if_equal(layers), vocab_rows=tuple(rows))
                return plan, (round(1000 * max(loads) / (sum(work) + self.cost[-1]) * p), sum(loads))
            most = [room if own >= least else 0 for own, room in zip(units, most, strict=True)]
        return None

    def may_predict_further(self, rows: Sequence[int]) -> bool:
        """Whether the rank of the MTP layers, if there are any, takes part in the vocabulary's collectives."""
        model, placement = self.job.model, self.placement
        rank = placement.rank_of(placement.stages - 1 - model.behind_mtp)
        return not model.mtp_heads or rows[rank] > 0 or rank in placement.vocab_members(())

    @property
    def row_seconds(self) -> Sequence[float]:
        """Predicted seconds that 0, 1, 2, ... units of rows add to a rank's time per microbatch. The values may
        decrease, because more units sometimes take less time.
        """
        assert self.unit is not None
        return _row_seconds(
            self.times, self.plan.vocab, self.job.model.vocab // self.unit, self.unit // self.job.tensor
        )

    @cached_property
    def cost(self) -> list[float]:
        """Like `row_seconds`, but never decreasing."""
        return list(accumulate(self.row_seconds, max))

    def room(self, layers: tuple[int, ...]) -> list[int]:
        """How many units of rows fit into each rank's memory. Memory is linear in rows, so it is predicted for one unit
        and for all rows, and interpolated between them.
        """
        job, total = self.job, len(self.cost) - 1
        if self.limit is None:
            return [total] * job.pipeline
        assert self.unit is not None
        most = []
        for rank, stages in enumerate(self.placement.stage_of):
            key = rank, tuple(layers[stage] for stage in stages)
            if key not in self.ends_of_memory:
                self.ends_of_memory[key] = tuple(
                    MemoryModel(job, self.order, layers, self.hardware, (rows // job.tensor,) * job.pipeline)
                    .rank(rank)
                    .total
                    for rows in (self.unit, job.model.vocab)
                )
            least, all_rows = self.ends_of_memory[key]
            share = (self.limit - least) / (all_rows - least)
            most.append(min(total, max(0, int(1 + share * (total - 1)))))
        return most

    @cached_property
    def order(self) -> Schedule:
        """The schedule with even shards, whose pass order serves to predict the memory peak of each rank."""
        return make_simulator(sampled(self.job), self.even, self.hardware).schedule


def unit_of_rows(vocab: int, ranks: int, tensor: int) -> int | None:
    """The unit in which rows are assigned to shards; None if `tensor` ranks cannot share the vocabulary equally."""
    if vocab % tensor:
        return None
    return next((unit * tensor for unit in UNITS if vocab >= FINE_ENOUGH * unit * tensor * ranks), tensor)


@lru_cache(maxsize=16)
def _row_seconds(times: PassTimes, method: VocabMethod, units: int, each: int) -> Sequence[float]:
    return [sum(times.vocabulary_passes(method, each * count)) for count in range(units + 1)]


def _none_if_equal(layers: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if len(set(layers)) == 1 else layers
