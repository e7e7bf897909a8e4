"""Which parallel sizes, schedule and vocabulary method train fastest on a number of GPUs, and which on less memory.

Every combination gets a lower bound of its time and an estimate of its memory, which take less than a millisecond.
Combinations are then simulated in the order of their bounds. One that cannot be better than a simulated one, neither in
time nor in memory, is left out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from megatron_vp.cost.balance.balanced import balanced
from megatron_vp.cost.hardware.constants import CALIBRATED, ERROR_BAND, Constants
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.memory.layer_memory import layer_memory
from megatron_vp.cost.memory.rank_memory import MemoryModel
from megatron_vp.cost.planning.planner import (
    LARGEST,
    PLAIN,
    REDISTRIBUTED,
    Candidate,
    Evaluation,
    candidates,
    evaluate,
    simplicity,
)
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.cost.prediction.predict import after_passes, layers_of, stage_costs
from megatron_vp.cost.sizes.job_sizes import job_of
from megatron_vp.cost.sizes.layer_types import model_layers, stage_layers
from megatron_vp.cost.sizes.shapes import Job, Plan, Recompute
from megatron_vp.errors import UserError
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.schedule import Schedule, ScheduleRequest, VocabMethod, family
from megatron_vp.schedule.expand_interlaced import EMBEDDED_AHEAD
from megatron_vp.schedule.reorder import EMBEDDING_GRADIENTS

MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences per microbatch that are tried."""

CONTEXT_TOKENS = 4096
"""Least tokens of a sequence on a context-parallel rank: with fewer, its exchange of keys and values would show."""

SLOWEST = 1.5
"""The frontier ends where runs take this many times as long as the fastest."""

MARGIN = 1.2
"""Estimates of memory are at most this many times the simulated one. With more than that nothing needs a simulation."""

MOST_BALANCED = 16
"""Pipeline ranks up to which layers and shards are balanced: for more, one choice takes seconds."""

SECONDS = 40.0
"""Time for simulations. Bounds and the start of the processes take some ten seconds more on two cores."""

OUTSIDE = {"IF": EMBEDDED_AHEAD, "T": 2, "IB": EMBEDDING_GRADIENTS}
"""Vocabulary passes of a rank that may run before its first forward or after its last backward."""

DIMENSIONS = {
    "tensor": ("tensor_model_parallel_size",),
    "context": ("context_parallel_size",),
    "pipeline": ("pipeline_model_parallel_size",),
    "expert": ("expert_model_parallel_size",),
    "micro-batch": ("micro_batch_size",),
    "recompute": ("recompute_granularity", "recompute_method", "recompute_num_layers"),
}
"""What a search varies, and the arguments behind it. Data parallelism takes the GPUs that are left."""

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NO_RECOMPUTE = dict.fromkeys(FULL_RECOMPUTE)


@dataclass(frozen=True)
class Variant:
    """A job on all GPUs, and the arguments that make it from the configuration."""

    job: Job
    settings: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A simulated combination. `variant` is an index into `Search.variants`."""

    variant: int
    evaluation: Evaluation

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.evaluation.iteration_seconds

    @property
    def memory(self) -> float:
        """Bytes that the fullest rank must have."""
        return self.evaluation.peak_memory


@dataclass(frozen=True)
class Search:
    """What a search has tried and found, the fastest first.

    too_large: combinations that need more memory than there is, by estimate. dominated: those that cannot be better
    than a simulated one. untried: those for which there was no time left; they take at least `untried_seconds`.
    """

    variants: Sequence[Variant]
    found: Sequence[Found]
    too_large: int
    dominated: int
    untried: int = 0
    untried_seconds: float = math.inf

    @property
    def count(self) -> int:
        """How many combinations there were."""
        return len(self.found) + self.too_large + self.dominated + self.untried

    def tied(self, limit: float, band: float = ERROR_BAND["time"]) -> list[Found]:
        """Those that fit and are within `band`, the stated error of a prediction, of the fastest; the simplest first.

        Fewer context and tensor ranks are simpler, and so is no recomputation; then see `planner.simplicity`.
        """
        fitting = self.fitting(limit)
        near = [each for each in fitting if each.seconds <= (1 + band) * fitting[0].seconds]

        def simplest(each: Found) -> tuple[float, ...]:
            job = self.variants[each.variant].job
            recomputes = job.recompute is not Recompute.NONE
            return (job.context, recomputes, job.tensor, job.expert, *simplicity(each.evaluation))

        return sorted(near, key=simplest)

    def fitting(self, limit: float) -> list[Found]:
        """Those that fit `limit` bytes per rank, the fastest first."""
        return [each for each in self.found if each.memory <= limit]

    def frontier(self, limit: float) -> list[Found]:
        """Those than which no other is both faster and smaller, the fastest first; only what fits."""
        kept: list[Found] = []
        for each in self.fitting(limit):
            if not kept or each.memory < kept[-1].memory:
                kept.append(each)
        return kept


def variants(arguments: Mapping[str, Any], gpus: int, hardware: Hardware, keep: Collection[str] = ()) -> list[Variant]:
    """All ways to cut the job that `arguments` describe over `gpus` GPUs; `keep` names dimensions to leave alone.

    Tensor ranks share a node and sequence parallelism comes with them. Sizes that do not go with the model or with the
    global batch are left out. Raises UserError for arguments without a global batch size, and where nothing is left.
    """
    if arguments.get("global_batch_size") is None:
        raise UserError("a search keeps the global batch: set --global-batch-size")
    # What is wrong whatever the sizes are, such as a missing one, is said here.
    job_of({name: value for name, value in arguments.items() if name not in _varied(())} | {"micro_batch_size": 1})
    found, reason = [], f"--global-batch-size {arguments['global_batch_size']} does not go with {gpus} GPUs"
    for sizes in _sizes(arguments, gpus, hardware, keep):
        settings = sizes | {"sequence_parallel": sizes["tensor_model_parallel_size"] > 1}
        try:
            job = job_of(dict(arguments) | settings, gpus)
        except UserError as error:
            reason = str(error)
            continue
        found.append(Variant(job, settings))
    if not found:
        raise UserError(
            f"no combination of parallel sizes runs this job on {gpus} GPUs; the last was refused: {reason}"
        )
    return found


def _varied(keep: Collection[str]) -> set[str]:
    return {name for dimension, names in DIMENSIONS.items() if dimension not in keep for name in names}


def _sizes(
    arguments: Mapping[str, Any], gpus: int, hardware: Hardware, keep: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Combinations by their arithmetic alone."""

    def own(dimension: str, tried: Sequence[int]) -> Sequence[int]:
        return [arguments.get(DIMENSIONS[dimension][0]) or 1] if dimension in keep else tried

    experts, sequence, layers = (arguments.get(name) or 0 for name in ("num_experts", "seq_length", "num_layers"))
    pattern = pattern_in(arguments)
    if pattern is not None:
        layers = len(pattern.letters)
    tensor = own("tensor", [size for size in _powers(hardware.gpus_per_node) if size <= gpus])
    context = own("context", [size for size in _powers(gpus) if size == 1 or sequence // size >= CONTEXT_TOKENS])
    expert = own("expert", [size for size in _powers(gpus) if size == 1 or (experts and experts % size == 0)])
    kept = {name: arguments.get(name) for name in FULL_RECOMPUTE}
    recompute = [kept] if "recompute" in keep else [NO_RECOMPUTE, FULL_RECOMPUTE]
    for t, c, e, micro, again in product(tensor, context, expert, own("micro-batch", MICRO_BATCHES), recompute):
        deep = [size for size in range(1, min(layers, LARGEST, gpus) + 1) if gpus % (t * c * size) == 0]
        for p in own("pipeline", deep):
            if gpus % (t * c * p) or gpus // (t * c * p) % e:
                continue
            yield {
                "tensor_model_parallel_size": t,
                "context_parallel_size": c,
                "pipeline_model_parallel_size": p,
                "expert_model_parallel_size": e,
                "micro_batch_size": micro,
                **again,
            }


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def search(
    tried: Sequence[Variant],
    hardware: Hardware,
    limit: float,
    constants: Constants = CALIBRATED,
    seconds: float = SECONDS,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Search:
    """Simulate the combinations that may be the fastest, or the fastest on less memory, of those that fit `limit`.

    In processes, one per core. `progress` hears what is being done, and how many of how many are done. Raises UserError
    where nothing fits.
    """
    cores = len(os.sched_getaffinity(0))
    options: list[_Option] = []
    found: list[Found] = []
    dominated, untried, least = 0, 0, math.inf
    with worker_pool(cores) as pool:
        listed = [pool.submit(_options, index, each.job, hardware, constants) for index, each in enumerate(tried)]
        for done, future in enumerate(as_completed(listed), start=1):
            options += future.result()
            progress("bounds", done, len(listed))
        fitting = sorted(each for each in options if each.memory <= MARGIN * limit)
        ends = time.monotonic() + seconds
        running: dict[Future, int] = {}
        for done, option in enumerate(fitting):
            progress("simulating", done, len(fitting))
            while len(running) >= 2 * cores:
                found += _collect(running)
            if _is_dominated(option, found, limit):
                dominated += 1
                continue
            if time.monotonic() > ends and found:
                untried, least = untried + 1, min(least, option.seconds)
                continue
            job = tried[option.variant].job
            running[pool.submit(_evaluation, option, job, hardware, constants, limit)] = option.variant
        while running:
            found += _collect(running)
    found.sort(key=lambda each: (each.seconds, each.memory))
    result = Search(tried, found, len(options) - len(fitting), dominated, untried, least)
    if not result.fitting(limit):
        smallest = min([*(each.memory for each in found), *(each.memory for each in options)], default=0.0)
        raise UserError(
            f"nothing fits {limit / 2**30:.4g} GiB on these GPUs: the least is about {smallest / 2**30:.1f} GiB; "
            "use more or larger GPUs"
        )
    return result


@dataclass(frozen=True, order=True)
class _Option:
    """A combination before it is simulated: at least `seconds`, about `memory` bytes.

    balanced: layers and rows are yet to be chosen, see `balance.balanced`.
    """

    seconds: float
    memory: float
    variant: int
    place: int
    balanced: bool
    candidate: Candidate


def _is_dominated(option: _Option, found: Sequence[Found], limit: float) -> bool:
    """Whether a simulated run that fits is as fast as this one can be, and no larger; or much faster."""
    return any(
        each.memory <= limit
        and (
            (each.seconds <= option.seconds and each.memory <= option.memory)
            or SLOWEST * each.seconds <= option.seconds
        )
        for each in found
    )


def _collect(running: dict[Future, int]) -> list[Found]:
    """The results of those that have ended, at least one, which leave `running`."""
    ended, _ = wait(running, return_when=FIRST_COMPLETED)
    results = [(running.pop(future), future.result()) for future in ended]
    return [Found(variant, evaluation) for variant, evaluation in results if evaluation is not None]


def _evaluation(option: _Option, job: Job, hardware: Hardware, constants: Constants, limit: float) -> Evaluation | None:
    """None for what the job cannot run, and where even shards turn out to be as good as balanced ones."""
    candidate = option.candidate
    try:
        if option.balanced:
            plan = candidate.plan
            candidate = replace(candidate, plan=balanced(job, plan, hardware, constants, limit).plan(plan))
            if candidate.plan.vocab_rows is None:
                return None
        return evaluate(candidate, job, hardware, constants)
    except UserError:
        return None


def _options(variant: int, job: Job, hardware: Hardware, constants: Constants) -> list[_Option]:
    """What a job can be run with, `interlaced` left out: it is a comparison."""
    if job.pipeline == 1:
        tried = [Candidate(PLAIN, Plan())]
    else:
        tried = [each for each in candidates(job, hardware, constants) if each.plan.vocab is not VocabMethod.INTERLACED]
    found = []
    for place, candidate in enumerate(tried):
        if 0 in (candidate.plan.layers or ()) and candidate.method != REDISTRIBUTED:
            continue  # `evaluate` refuses stages without layers
        try:
            found_here = estimate(candidate.plan, job, hardware, constants)
        except UserError:
            continue
        found.append(_Option(found_here.seconds, found_here.memory, variant, place, False, candidate))
        if candidate.plan.vocab.is_sharded and candidate.plan.layers is not None and job.pipeline <= MOST_BALANCED:
            found.append(_Option(found_here.balanced_seconds, found_here.memory, variant, place, True, candidate))
    return found


class Estimate(NamedTuple):
    """Seconds that an iteration takes at least, with the layers and shards of the plan and with balanced ones, and
    roughly the bytes that the fullest rank needs.
    """

    seconds: float
    balanced_seconds: float
    memory: float


def estimate(plan: Plan, job: Job, hardware: Hardware, constants: Constants = CALIBRATED) -> Estimate:
    """What can be said of a plan without a simulation.

    A rank has its own work for all microbatches. Its first forward waits for one of every stage before it. Where
    backwards are whole, the last one of the first stage waits for that of the rank's own stage and those in between.
    Of its vocabulary passes a few run before and after that: see the limits in `schedule.reorder`.
    Raises UserError where the job cannot run `plan`.
    """
    single, peaks = _single(plan.request(job, microbatches=1)), plan.request(job).promised_peaks
    placement, costs = single.placement, stage_costs(job, plan, single, hardware, constants)
    layers = layers_of(job, plan, placement)
    if job.model.tied and plan.vocab is VocabMethod.NONE and not family(plan.schedule).ends_on_last_rank:
        raise UserError("tied embeddings would belong to both chunks of the first rank")
    before = [0.0, *accumulate(costs.F)]
    behind = [0.0, *accumulate(backward + weight for backward, weight in zip(costs.B, costs.W, strict=True))]
    memory = MemoryModel(job, single, layers, hardware)
    kept, held = {}, stage_layers(job, layers)
    for kind in model_layers(job):
        layer = layer_memory(job, single.split_backward, kind)
        kept[kind] = max(layer.kept, layer.waiting) if single.split_backward else layer.kept
    seconds, fullest, total, sharded = 0.0, 0.0, 0.0, plan.vocab.is_sharded
    for rank, stages in enumerate(placement.stage_of):
        work = sum(costs.duration(single, rank, step) for step in single.ranks[rank])
        total += work
        first = min(stages)
        drain = 0.0 if single.split_backward else behind[first]
        outside = (
            sum(most_outside * costs.named()[kind][rank] for kind, most_outside in OUTSIDE.items()) if sharded else 0.0
        )
        seconds = max(seconds, job.microbatches * work, before[first] + job.microbatches * work + drain - outside)
        activations = (peaks[rank] / placement.chunks - 1) * sum(
            count * kept[kind] for stage in stages for kind, count in held[stage].counts.items()
        )
        fullest = max(fullest, memory.rank(rank).total + activations)
    after = after_passes(job, plan, single, hardware, constants)
    return Estimate(seconds + after, job.microbatches * total / job.pipeline + after, fullest)


@lru_cache(maxsize=512)
def _single(request: ScheduleRequest) -> Schedule:
    return request.schedule()
