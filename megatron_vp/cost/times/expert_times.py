"""Work of a layer with experts outside its matrix products: launches, copies, separate activations."""

from __future__ import annotations

from typing import NamedTuple

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.sizes.layer_types import LayerType, MlpRecompute, mlp_of, mlp_recompute
from megatron_vp.cost.sizes.shapes import Dispatcher, Job

LAUNCHES = 0.4e-3
"""Seconds per layer with experts for work too small to keep a GPU busy: the router's top k, counts that the host waits
for, about a hundred launches. The backward takes twice as long.
"""

PRODUCT = 20e-6
"""Extra seconds per expert product if a rank has several: its launch, and a last wave of tiles that leaves SMs idle.
Set by hand on public jobs on H100, which put it at 15 to 30 microseconds.
"""

COPIES, SORTED = 8, 4
"""Passes over the tokens of experts in 16 bits that all-to-all needs: into the order of ranks and back, each a kernel
that gathers short rows, and the exchange's own; where a rank has several experts also into their order and back.
"""

FLEXIBLE, FLEXIBLE_DISTINCT = 2, 6
"""The same for the flexible dispatcher: sorting by expert and back, and data moved once per rank."""

CLAMP_FORWARD, CLAMP_BACKWARD = 16, 24
"""Bytes moved per element to clamp an expert's activation in 16 bits: both halves are read and written, and joined in a
copy. The backward reads them again.
"""

BIAS_FORWARD, BIAS_BACKWARD = 28, 36
"""Bytes per element of the experts' results that adding their biases moves, each times a token's probability, which is
in fp32: product 4, sum 10, joined 8, narrowed 6; widened 6, narrowed 6, and two products with their sums 12 each.
"""


class Separate(NamedTuple):
    """Bytes that separate kernels move in a layer's forward and backward."""

    forward: float
    backward: float


def distinct(places: int, per_token: int) -> float:
    """Expected share of a token's copies that go to distinct `places`, with experts chosen uniformly."""
    return places * (1 - (1 - 1 / places) ** per_token) / per_token


def is_flexible(job: Job, hardware: Hardware) -> bool:
    """Whether the flexible dispatcher moves the tokens, including jobs that name no dispatcher."""
    if job.dispatcher is Dispatcher.UNSAID:
        return job.expert * job.expert_tensor > hardware.gpus_per_node
    return job.dispatcher is Dispatcher.FLEXIBLE


def copies(job: Job, kind: LayerType, hardware: Hardware) -> float:
    """Passes over the tokens of a layer's experts, each token counted once for each of its experts."""
    mlp = mlp_of(job.model, kind)
    if mlp is None or not mlp.experts:
        return 0.0
    if is_flexible(job, hardware):
        return FLEXIBLE + FLEXIBLE_DISTINCT * distinct(job.expert, mlp.per_token)
    return COPIES + SORTED * (mlp.experts > job.expert)


def separate_activation(job: Job, kind: LayerType) -> Separate:
    """Bytes for clamped activations (GPT-OSS) and expert biases, neither of which Megatron fuses."""
    mlp = mlp_of(job.model, kind)
    if mlp is None or not mlp.experts or not job.model.clamped:
        return Separate(0.0, 0.0)
    tokens = job.tokens * mlp.per_token / job.tensor
    clamped, biased = tokens * mlp.width, tokens * job.model.hidden * job.model.expert_biases
    again = 0 if mlp_recompute(job, kind) is MlpRecompute.NONE else CLAMP_FORWARD
    return Separate(
        CLAMP_FORWARD * clamped + BIAS_FORWARD * biased, (CLAMP_BACKWARD + again) * clamped + BIAS_BACKWARD * biased
    )
