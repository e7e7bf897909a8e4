"""Computes the time of a layer's attention, from published rates of fused kernels or from fitted constants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.jobs.layer_kind import LayerKind

BACKWARD = 2.5
"""FLOPs of a fused attention backward relative to the forward: five matrix products instead of two."""

HALF = 350
"""Keys per sequence at which fused kernels reach half of their peak rate. Published times on H100 imply 200 to 500."""

NARROW = 0.4
"""Kernels would lose this share of their rate at head width 0. The lost share falls linearly with the head width, to 0
at 128. Published rates for heads of width 64 are 0.77 to 0.84 of the rates for heads of width 128.
"""

TILE = 128
"""Number of keys in a tile, which a kernel always computes as a whole."""

SCORE_BYTES = 13
"""Bytes per score that the forward of unfused attention writes and reads: the results of the query-key product, the
softmax and the dropout.
"""


class AttentionTimes(NamedTuple):
    """Seconds that one layer's attention takes for a microbatch."""

    forward: float
    backward: float


def attention_times(job: Job, hardware: Hardware, flops: float) -> AttentionTimes:
    """Times of one layer's attention on one rank, without the projections before and after it; `flops`: its FLOPs, not
    halved for causality.
    """
    causal = flops / 2
    if job.layers is LayerKind.LOCAL and hardware.is_gpu:
        # Unfused attention also computes, writes and reads the scores above the diagonal.
        moved = SCORE_BYTES * job.scores / (hardware.memory_bandwidth * hardware.constants.bandwidth)
        forward = 2 * causal / (hardware.peak_flops * hardware.constants.matrix) + moved
        return AttentionTimes(forward, 2 * forward)
    reached: Iterable[float] = hardware.constants.attention_forward, hardware.constants.attention_backward
    rates = hardware.rates
    if rates is not None and rates.attention is not None and job.layers is LayerKind.ENGINE:
        share, older = job.flash_attention_2, rates.flash_attention_2 or rates.attention
        reached = (1 / ((1 - share) / new + share / old) for new, old in zip(rates.attention, older, strict=True))
        keys, narrow = job.sequence / job.context, max(0.0, 1 - job.model.head_size / 128)
        causal *= _seen(job) * (1 + HALF / keys) / (1 - NARROW * narrow)
    forward, backward = (causal / (hardware.peak_flops * each) for each in reached)
    return AttentionTimes(forward, BACKWARD * backward)


def _seen(job: Job) -> float:
    """The share of the causal scores that attention computes. Sliding-window layers skip all but the last `window`
    tokens.
    """
    model = job.model
    inside = min(1.0, (model.window + TILE) / (job.sequence / 2))
    return 1 - model.windowed * (1 - inside)
