"""Distributes transformer layers over virtual stages."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from megatron_vp.cost.layers.flops import output_flops
from megatron_vp.cost.layers.layer_operations import layer_flops
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.errors import UserError
from megatron_vp.jobs.division import UNEVEN_LAYERS
from megatron_vp.schedule import Placement


def equal_layers(job: Job, stages: int) -> tuple[int, ...]:
    """Give every stage the same number of layers. Raises UserError if the layers cannot be divided equally."""
    each, rest = divmod(job.model.layers, stages)
    if rest or not each:
        raise UserError(UNEVEN_LAYERS.format(num_layers=job.model.layers, stages=stages))
    return (each,) * stages


def spread_layers(job: Job, placement: Placement) -> tuple[int, ...] | None:
    """Spread layers over the ranks as evenly as possible; return None if all stages get the same number."""
    total, p = job.model.layers, placement.ranks
    if not total % placement.stages:
        return None
    return by_stage([total * (rank + 1) // p - total * rank // p for rank in range(p)], placement)


def by_stage(counts: Sequence[int], placement: Placement) -> tuple[int, ...]:
    """Number of layers of every virtual stage, given each rank's number of layers (`counts`).

    If a rank's layers do not divide equally, some of its chunks get one more; which ones varies from rank to rank.
    """
    layers, chunks = [0] * placement.stages, placement.chunks
    for rank, stages in enumerate(placement.stage_of):
        each, larger = divmod(counts[rank], chunks)
        for place in range(chunks):
            layers[stages[(rank + place) % chunks]] = each + (place < larger)
    return tuple(layers)


def redistributed_layers(job: Job, placement: Placement | None = None) -> tuple[int, ...]:
    """Layers per virtual stage in the paper's method `redis`: fewer layers on the rank with the output layer.

    The rank with the output layer gets max(0, ceil((L + o) / p - o)) of the L layers, where o is the output layer's
    FLOPs divided by those of one layer. This formula reproduces all four published layouts for eight GPUs. The other
    stages share the remaining layers as evenly as possible, with more layers in later stages. Raises UserError if there
    are too few layers.
    """
    placement = placement or Placement.round_robin(job.pipeline)
    layers, p = job.model.layers, placement.ranks
    output = output_flops(job) / layer_flops(job)
    last = max(0, math.ceil((layers + output) / p - output - 1e-9))
    own = sorted(placement.stage_of[placement.last_rank], reverse=True)
    others = [stage for stage in range(placement.stages) if stage not in own]
    if not others or layers - last < len(others):
        raise UserError(
            f"{layers} layers are too few to redistribute over {placement.stages} stages; use fewer stages or chunks"
        )
    found = dict(zip(others, _spread(layers - last, len(others)), strict=True))
    found |= zip(own, _spread(last, len(own)), strict=True)
    return tuple(found[stage] for stage in range(placement.stages))


def least_work_layers(count: int, layer: float, work: Sequence[float], placement: Placement) -> tuple[int, ...] | None:
    """Layers per virtual stage that minimise the busiest rank's work; None if there are too few layers.

    At first, each stage except the model's first and last gets one layer. Then each remaining layer goes to the rank
    with the least work so far. Each rank's layers are spread evenly over its stages. Any remainder goes to inner stages
    if possible, not to the model's first or last stage.

    layer: seconds of one layer.
    work: seconds that each rank spends outside its layers.
    """
    ends = (0, placement.stages - 1)
    given = [sum(stage not in ends for stage in stages) for stages in placement.stage_of]
    if sum(given) > count:
        return None
    queue = [(load + (count + 1) * layer, rank) for rank, (load, count) in enumerate(zip(work, given, strict=True))]
    heapq.heapify(queue)
    for _ in range(count - sum(given)):
        load, rank = queue[0]
        given[rank] += 1
        heapq.heapreplace(queue, (load + layer, rank))
    layers = [0] * placement.stages
    for rank, stages in enumerate(placement.stage_of):
        each, larger = divmod(given[rank], len(stages))
        inner_first = sorted(stages, key=lambda stage: stage in ends)
        for place, stage in enumerate(inner_first):
            layers[stage] = each + (place < larger)
    return tuple(layers)


def _spread(layers: int, stages: int) -> tuple[int, ...]:
    each, larger = divmod(layers, stages)
    return (each,) * (stages - larger) + (each + 1,) * larger
