"""Models what experts cost in addition to their matrix products: kernel launches, copies, and unfused activation
functions.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.layer_types import LayerType, MlpRecompute, mlp_of, mlp_recompute
from megatron_vp.cost.sizes.shapes import Dispatcher, Job

LAUNCHES = 0.4e-3
"""Seconds that a layer with experts spends on work that is too small to keep a GPU busy: the router's top-k selection,
token counts that the host waits for, and about a hundred kernel launches. In the backward, this work takes twice as
long.
"""

PRODUCT = 20e-6
"""Extra seconds per matrix product of an expert if a rank has several experts: for the product's launch, and for a last
wave of tiles that leaves SMs idle. The value was chosen by hand; published runs on H100 suggest 15 to 30 microseconds.
"""

COPIES, SORTED = 8, 4
"""How often the all-to-all dispatcher reads or writes the experts' tokens. COPIES is for sorting the tokens by rank,
exchanging them, and undoing both. If a rank has several experts, SORTED is added for sorting the tokens by expert and
undoing this.
"""

FLEXIBLE, FLEXIBLE_DISTINCT = 2, 6
"""How often the flexible dispatcher reads or writes a token. FLEXIBLE applies once per expert chosen for the token, and
covers sorting the tokens by expert and restoring their order. FLEXIBLE_DISTINCT applies once per rank that has any of
the token's experts, and covers sending the token to that rank and the result back.
"""

CLAMP_FORWARD, CLAMP_BACKWARD = 16, 24
"""Bytes moved per element of an expert's gated activation to clamp its gate and linear input in 16 bits. Each of the
two is read and written, then both are copied into one tensor. The backward handles the gradients in the same way. It
also reads the gate and the linear input, and writes and reads a mask for each of them.
"""

BIAS_FORWARD, BIAS_BACKWARD = 28, 36
"""Bytes moved per element of the experts' results to multiply biases by the token's probability in fp32 and to add
them. The forward moves 4 bytes to multiply, 10 to add, 8 to concatenate and 6 to convert to 16 bits. The backward moves
6 bytes to convert to fp32, 6 to convert back, and 12 each for the gradients of the biases and of the probabilities.
"""


class Separate(NamedTuple):
    """Bytes that unfused kernels move in a layer's forward and backward."""

    forward: float
    backward: float


def distinct(places: int, per_token: int) -> float:
    """Expected number of different places that hold a token's `per_token` experts, divided by `per_token`.

    Each expert is in one of `places` places, chosen uniformly.
    """
    return places * (1 - (1 - 1 / places) ** per_token) / per_token


def is_flexible(job: Job, hardware: Hardware) -> bool:
    """Whether the flexible dispatcher moves the tokens.

    A job that names no dispatcher is assumed to use it if the expert-parallel ranks span several nodes.
    """
    if job.dispatcher is Dispatcher.UNSAID:
        return job.expert * job.expert_tensor > hardware.gpus_per_node
    return job.dispatcher is Dispatcher.FLEXIBLE


def copies(job: Job, kind: LayerType, hardware: Hardware) -> float:
    """Number of times that the dispatcher reads or writes a token in one layer, divided by the number of the token's
    experts.
    """
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
