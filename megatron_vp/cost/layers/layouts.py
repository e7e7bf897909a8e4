"""Distributes transformer layers over virtual stages."""

from __future__ import annotations

import math

from megatron_vp.cost.layers.flops import output_flops
from megatron_vp.cost.layers.layer_operations import layer_flops
from megatron_vp.cost.layers.shapes import Job
from megatron_vp.errors import UserError


def equal_layers(job: Job, stages: int) -> tuple[int, ...]:
    """Give every stage the same number of layers. Raises UserError if the layers cannot be divided equally."""
    each, rest = divmod(job.model.layers, stages)
    if not each:
        raise UserError(
            f"{job.model.layers} layers cannot fill {stages} virtual stages; use fewer pipeline ranks or chunks"
        )
    if rest:
        raise UserError(
            f"{job.model.layers} layers cannot be split equally over {stages} stages: use a number of stages that "
            "divides the number of layers, or assign the layers to stages with --pipeline-model-parallel-layout"
        )
    return (each,) * stages


def redistributed_layers(job: Job) -> tuple[int, ...]:
    """Layers per stage in the paper's method `redis`: fewer layers on the last stage, which has the output layer.

    The last stage gets max(0, ceil((L + o) / p - o)) of the L layers, where o is the output layer's FLOPs divided by
    those of one layer. This formula reproduces all four published layouts for eight GPUs. The other stages share the
    remaining layers as evenly as possible, with more layers in later stages. Raises UserError if there are too few
    layers.
    """
    layers, p = job.model.layers, job.pipeline
    output = output_flops(job) / layer_flops(job)
    last = max(0, math.ceil((layers + output) / p - output - 1e-9))
    each, larger = divmod(layers - last, p - 1)
    if not each:
        raise UserError(f"{layers} layers are too few to redistribute over {p} stages; use fewer stages")
    return (each,) * (p - 1 - larger) + (each + 1,) * larger + (last,)
