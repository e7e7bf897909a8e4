"""Memory of one transformer layer: activations that it keeps for the backward, and temporary buffers of its passes.

All figures are bytes on one rank. docs/evidence/predictions.md compares predictions with the bytes counted by
`replay --shapes-only`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_vp.cost.layers.layer_operations import Op, operations
from megatron_vp.cost.layers.layer_types import type_of
from megatron_vp.cost.layers.shapes import Job, Recompute
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule.placed_copies import LEAST_OFFLOADED

WORKING_SET = 24.5
"""Bytes of temporary tensors per token and hidden unit in one layer's backward, in the paper's code."""

SPLIT_BACKWARD = 34
"""Additional bytes per token and hidden unit during a split backward, in the paper's code: the tensors that one
finished layer still keeps for W.
"""

SOFTMAX_IN_PASS = 6
"""Temporary bytes per score in Megatron's local attention without Apex, in addition to the kept softmax result."""


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer in bytes, for one microbatch, and further sums over its operations.

    kept: activations that are kept from F to B.
    waiting: tensors that are kept from B to W, if the backward is split.
    backward: temporary bytes in the backward, in addition to `kept`. With full recomputation, they include all
        activations of the layer.
    once: a buffer that a rank allocates once for all its layers.
    small: the part of `kept` that stays on the device if the layer is offloaded.
    weights, experts: the layer's parameters, and those of them that belong to experts.
    copies: fp8 copies of its weights, which exist from the first microbatch on.
    dense_flops, expert_flops: FLOPs of Muon's Newton-Schulz steps for matrices outside experts, and of experts.
    """

    kept: float
    waiting: float
    backward: float
    once: float = 0.0
    small: float = 0.0
    weights: int = 0
    experts: int = 0
    copies: float = 0.0
    dense_flops: float = 0.0
    expert_flops: float = 0.0


def layer_activations(job: Job, kind: str = "t") -> float:
    """Bytes that one layer keeps from F to B.

    A plain GPT layer in 16 bits with dropout and fused attention keeps 34 bytes per token and hidden unit (Korthikanti
    et al., 2022, equation 2 without the attention scores).
    """
    if job.recompute is Recompute.FULL:
        return job.element_bytes * job.units
    paper = job.layers is LayerKind.PAPER
    if paper and job.kept_bytes:
        return job.kept_bytes * job.tokens * job.model.hidden
    found = operations(job, kind)
    return _kept(found) if paper else sum(op.kept_bytes(job) for op in found)


def _kept(found: Iterable[Op]) -> float:
    return sum(sum(op.keeps) + sum(op.frees) for op in found)


def small_activations(job: Job, kind: str = "t") -> float:
    """Bytes of activations that stay on the device when a layer is offloaded: tensors too small to be worth a copy."""
    return sum(each for op in operations(job, kind) for each in (*op.keeps, *op.frees) if each < LEAST_OFFLOADED)


@lru_cache(maxsize=4096)
def layer_memory(job: Job, split: bool, kind: str = "t") -> LayerMemory:
    """The memory of one layer; `split`: whether its weight gradients are computed in a separate pass W."""
    kept, found = layer_activations(job, kind), operations(job, kind)
    if job.layers is LayerKind.PAPER:
        return LayerMemory(kept, kept, (WORKING_SET + (SPLIT_BACKWARD if split else 0)) * job.units)
    # A layer's memory peaks in the MLP's backward, when the gradient of the first matrix product's output exists. By
    # then, the input of the second product has been freed, unless W needs it. If a layer has no MLPs, its backward
    # holds the gradients of attention's queries, keys, values and output.
    backward = [0.0, *(op.gradients[split] for op in found if op.gradients)][-1]
    backward += _kept(op for op in found if op.again(job))
    unfused = job.layers is LayerKind.LOCAL and any(op.scores for op in found)
    once = job.element_bytes * job.scores if unfused else 0.0
    # W needs the inputs of the matrix products and the gradients of their outputs. Together, these tensors have as many
    # elements as the activations that a layer keeps.
    waiting = sum(sum(op.keeps) for op in found)
    if job.sequence_parallel and job.tensor > 1:
        # With sequence parallelism, each column-parallel layer gathers its input. The backward also holds the gradient
        # of the gathered input, and the slice of this gradient that stays on the rank. The output gradients of
        # attention and of a dense MLP are gathered over the tensor ranks before W uses them.
        gathered = job.tokens * job.element_bytes * job.model.hidden
        once += gathered
        backward += gathered * (1 + 1 / job.tensor)
        waiting += sum(op.name in ("proj", "down") and not op.expert for op in found) * gathered * (1 - 1 / job.tensor)
    return LayerMemory(kept, waiting, backward, once)


def _in_attention(job: Job, kinds: Sequence[str]) -> float:
    """Bytes of unfused attention's softmax in the forward of the last attention layer among `kinds`, beyond what they
    keep. The activations of later MLPs are subtracted, because they count as kept but do not exist yet.
    """
    if job.layers is not LayerKind.LOCAL:
        return 0.0
    found = [op for kind in kinds for op in operations(job, kind)]
    last = max((place for place, op in enumerate(found) if op.scores), default=None)
    if last is None:
        return 0.0
    later = sum(sum(op.keeps) for op in found[last:] if op.name in ("up", "activation"))
    return max(0.0, SOFTMAX_IN_PASS * job.scores - later)


class PassMemory(NamedTuple):
    """Temporary bytes in the passes of a stage, in addition to what its layers keep; see `LayerMemory`."""

    forward: float
    backward: float


@lru_cache(maxsize=4096)
def pass_memory(job: Job, split: bool, letters: str) -> PassMemory:
    """The temporary bytes in a stage's passes. `letters` is the stage's part of the model's layer pattern, if there is
    one.

    The backward needs the bytes of the largest MLP, or those of attention if the stage has no MLPs.
    """
    kinds = list(map(type_of, letters)) if job.model.pattern else ["t"]
    memory = {kind: layer_memory(job, split, kind).backward for kind in kinds}
    mlps = [each for kind, each in memory.items() if any(op.name == "down" for op in operations(job, kind))]
    return PassMemory(_in_attention(job, kinds), max(mlps or memory.values(), default=0.0))
