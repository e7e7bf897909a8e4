"""A lower bound on the time of 1F1B's passes, with which balanced runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.cost.planning.layer_division import divided, layer_seconds
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.schedule import Placement, VocabMethod


def least_passes(job: Job, method: VocabMethod, hardware: Hardware) -> float:
    """Lower bound in seconds on the time of 1F1B's passes, with the best split of layers and rows over equally fast
    ranks.

    The model has L layers on p pipeline ranks, and its vocabulary passes would take as long as k layers if one rank
    held all rows. Per microbatch, the busiest rank needs at least the time of max(ceil(L / p), (L + k) / p) layers.
    Filling and draining the pipeline takes as long as p - 1 average stages. For a hybrid model, the work of the largest
    stage in the most even cut replaces ceil(L / p).
    """
    times = PassTimes(job, hardware)
    layers, p, gaps = job.model.layers, job.pipeline, 2 * hardware.constants.gap
    layer = sum(times.layer())
    largest, total = -(-layers // p) * layer, layers * layer
    if job.model.pattern:
        letters, placement = layer_seconds(times), Placement.round_robin(p)
        cut, total = divided(letters, placement), sum(letters)
        largest = 0.0 if cut is None else max(loads_of(letters, placement, cut))
    vocabulary = sum(times.vocabulary_passes(method, job.model.vocab // job.tensor))
    busiest = max(largest, (total + vocabulary) / p) + gaps
    hops = 2 * times.message(0, 1, times.hidden_bytes)
    return job.microbatches * busiest + (p - 1) * (total / p + gaps + hops)


def loads_of(work: Sequence[float], placement: Placement, cut: Sequence[int]) -> list[float]:
    """Work of every rank if stage s gets `cut[s]` letters of the pattern."""
    loads, sums = [0.0] * placement.ranks, [0.0, *accumulate(work)]
    for stage, (start, end) in enumerate(pairwise(accumulate(cut, initial=0))):
        loads[placement.rank_of(stage)] += sums[end] - sums[start]
    return loads
