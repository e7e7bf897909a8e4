"""Models the work in a layer with experts other than matrix products: launches, copies and unfused activations."""

from __future__ import annotations

from typing import NamedTuple

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.layer_types import LayerType, MlpRecompute, mlp_of, mlp_recompute
from megatron_vp.cost.sizes.shapes import Dispatcher, Job

LAUNCHES = 0.4e-3
"""Seconds per layer with experts for work that is too small to keep a GPU busy: the router's top k, counts for which
the host waits, and about a hundred launches. The backward takes twice as long.
"""

PRODUCT = 20e-6
"""Extra seconds per matrix product of an expert if a rank has several experts: for the product's launch, and for a last
wave of tiles that leaves SMs idle. The value was chosen by hand; published runs on H100 suggest 15 to 30 microseconds.
"""

COPIES, SORTED = 8, 4
"""How often the all-to-all dispatcher reads or writes the experts' tokens: COPIES times to exchange and sort them by
rank and back; SORTED more times to sort them by expert and back if a rank has several experts.
"""

FLEXIBLE, FLEXIBLE_DISTINCT = 2, 6
"""How often the flexible dispatcher reads or writes tokens: FLEXIBLE times per expert of a token, to sort by expert and
back; FLEXIBLE_DISTINCT times per rank that has some of a token's experts, to send it there.
"""

CLAMP_FORWARD, CLAMP_BACKWARD = 16, 24
"""Bytes moved per element to clamp an expert's gated activation in 16 bits: its gate and its linear input are each
read, written, and copied into one tensor. The backward reads the gate and the linear input again.
"""

BIAS_FORWARD, BIAS_BACKWARD = 28, 36
"""Bytes moved per element of the experts' results to add biases, each multiplied by its token's probability in fp32.
The forward moves 4 bytes to multiply, 10 to add, 8 to concatenate and 6 to convert to 16 bits. The backward moves 6
bytes to convert to fp32, 6 to convert back, and 12 for each of two products with its sum.
"""


class Separate(NamedTuple):
    """Bytes that unfused kernels move in a layer's forward and backward."""

    forward: float
    backward: float


def distinct(places: int, per_token: int) -> float:
    """Expected number of distinct `places` that hold a token's uniformly chosen experts, divided by `per_token`."""
    return places * (1 - (1 - 1 / places) ** per_token) / per_token


def is_flexible(job: Job, hardware: Hardware) -> bool:
    """Whether the flexible dispatcher moves the tokens; if the job names no dispatcher, it is assumed between nodes."""
    if job.dispatcher is Dispatcher.UNSAID:
        return job.expert * job.expert_tensor > hardware.gpus_per_node
    return job.dispatcher is Dispatcher.FLEXIBLE


def copies(job: Job, kind: LayerType, hardware: Hardware) -> float:
    """How often the tokens of a layer's experts are read or written, counting a token once for each of its experts."""
    mlp = mlp_of(job.model, kind)
    if mlp is None or not mlp.experts:
        return 0.0
    if is_flexible(job, hardware):
        return FLEXIBLE + FLEXIBLE_DISTINCT * distinct(job.expert, mlp.per_token)
    return COPIES + SORTED * (mlp.experts > job.expert)


def separate_activation(job: Job, kind: LayerType) -> Separate:
    """Bytes moved for clamped activations (GPT-OSS) and expert biases, neither of which Megatron fuses."""
    mlp = mlp_of(job.model, kind)
    if mlp is None or not mlp.experts or not job.model.clamped:
        return Separate(0.0, 0.0)
    tokens = job.tokens * mlp.per_token / job.tensor
    clamped, biased = tokens * mlp.width, tokens * job.model.hidden * job.model.expert_biases
    again = 0 if mlp_recompute(job, kind) is MlpRecompute.NONE else CLAMP_FORWARD
    return Separate(
        CLAMP_FORWARD * clamped + BIAS_FORWARD * biased, (CLAMP_BACKWARD + again) * clamped + BIAS_BACKWARD * biased
    )
