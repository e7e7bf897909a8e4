"""Memory of transformer layers: activations kept for the backward, temporary buffers of their passes, and weights.

All figures are bytes on one rank. docs/evidence/predictions.md compares predictions with the bytes counted by
`replay --shapes-only`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.fp8 import fp8_weights, quantised
from megatron_vp.cost.layers.layer_operations import layer_weights, operations
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
    """Memory of a layer or of a stage's layers in bytes, for one microbatch, and further sums over their operations.

    kept: activations that are kept from F to B.
    waiting: tensors that are kept from B to W, if the backward is split.
    small: the part of `kept` that stays on the device if the layer is offloaded, because copies are not worth it.
    weights, experts: the layer's parameters, and those of them that belong to experts.
    copies: fp8 copies of its weights, which exist from the first microbatch on.
    dense_flops, expert_flops: FLOPs of Muon's Newton-Schulz steps for matrices outside experts, and of experts.
    backward: temporary bytes in the backward, in addition to `kept`. With full recomputation, they include all
        activations of the layer.
    once: a buffer that a rank allocates once for all its layers.
    forward: temporary bytes in the forward of a stage.
    """

    kept: float
    waiting: float
    small: float
    weights: float
    experts: float
    copies: float
    dense_flops: float
    expert_flops: float
    backward: float
    once: float = 0.0
    forward: float = 0.0


_SUMMED = ("kept", "waiting", "small", "weights", "experts", "copies", "dense_flops", "expert_flops")


@lru_cache(maxsize=4096)
def layer_memory(job: Job, hardware: Hardware, split: bool, kind: str = "t") -> LayerMemory:
    """The memory of one layer; `split`: whether its weight gradients are computed in a separate pass W.

    A plain GPT layer in 16 bits with dropout and fused attention keeps 34 bytes per token and hidden unit (Korthikanti
    et al., 2022, equation 2 without the attention scores).
    """
    found, paper = operations(job, kind), job.layers is LayerKind.PAPER
    experts = [op for op in found if op.expert]
    of_experts = sum(op.matrix.orthogonal_flops for op in experts if op.matrix)
    orthogonal = sum(op.matrix.orthogonal_flops for op in found if op.matrix)
    kept, saved, copies = sum(op.kept_bytes(job) for op in found), 0.0, 0.0
    if job.fp8:
        each = quantised(job.fp8, hardware)
        copies = each.kept * fp8_weights(job, kind)
        # The inputs of the QKV product, of the MLP, and of the MLP's second product are kept in fp8 instead of 16 bits.
        # The input of the output projection is kept in both formats, because attention's backward needs it in 16 bits.
        narrow = (
            each.columns or each.rows
        )  # per element of a product's input, from which W computes the weight gradient
        left = [op for op in found if not op.again(job)]
        saved = sum((job.element_bytes - narrow) * op.narrow - narrow * op.doubled for op in left)
    if job.recompute is Recompute.FULL:
        kept = job.element_bytes * job.units
    elif paper and job.kept_bytes:
        kept = job.kept_bytes * job.tokens * job.model.hidden
    # W needs the inputs of the matrix products and the gradients of their outputs. Together, these tensors have as many
    # elements as the activations that a layer keeps.
    waiting, once = sum(sum(op.keeps) for op in found), 0.0
    # A layer's memory peaks in the MLP's backward, when the gradient of the first matrix product's output exists. By
    # then, the input of the second product has been freed, unless W needs it. If a layer has no MLPs, its backward
    # holds the gradients of attention's queries, keys, values and output.
    backward = [0.0, *(op.gradients[split] for op in found if op.gradients)][-1]
    backward += sum(op.made_bytes for op in found if op.again(job))
    if paper:
        waiting, backward = kept, (WORKING_SET + split * SPLIT_BACKWARD) * job.units
    elif job.sequence_parallel and job.tensor > 1:
        # With sequence parallelism, each column-parallel layer gathers its input. The backward also holds the gradient
        # of the gathered input, and the slice of this gradient that stays on the rank. The output gradients of
        # attention and of a dense MLP are gathered over the tensor ranks before W uses them.
        gathered = job.tokens * job.element_bytes * job.model.hidden
        once += gathered
        backward += gathered * (1 + 1 / job.tensor)
        waiting += sum(op.name in ("proj", "down") and not op.expert for op in found) * gathered * (1 - 1 / job.tensor)
    if job.layers is LayerKind.LOCAL and any(op.scores for op in found):
        once += job.element_bytes * job.scores
    return LayerMemory(
        kept - saved,
        waiting - saved,
        sum(each for op in found for each in (*op.keeps, *op.frees) if each < LEAST_OFFLOADED),
        layer_weights(job, kind),
        sum(op.weights for op in experts),
        copies,
        job.muon * (orthogonal - of_experts),
        job.muon * of_experts,
        backward,
        once,
    )


@lru_cache(maxsize=4096)
def stage_memory(job: Job, hardware: Hardware, split: bool, kinds: tuple[str, ...]) -> LayerMemory:
    """The memory of a stage with layers of `kinds`, in order.

    The backward needs the bytes of the largest MLP, or those of attention if the stage has no MLPs. Heads of
    multi-token prediction are like the layers before them, so the passes need no more bytes for them.
    """
    own = list(takewhile("m".__ne__, kinds)) or ["t"] * (not job.model.pattern)
    counts = Counter(kinds)
    layers = {kind: layer_memory(job, hardware, split, kind) for kind in {*counts, *own}}
    needed = {kind: layers[kind].backward for kind in own}
    mlps = [each for kind, each in needed.items() if any(op.name == "down" for op in operations(job, kind))]
    return LayerMemory(
        **{name: sum(count * getattr(layers[kind], name) for kind, count in counts.items()) for name in _SUMMED},
        backward=max(mlps or needed.values(), default=0.0),
        once=max((layers[kind].once for kind in counts), default=0.0),
        forward=_in_attention(job, own),
    )


def _in_attention(job: Job, kinds: Sequence[str]) -> float:
    """Bytes of unfused attention's softmax in the forward of the last attention layer among `kinds`, beyond what they
    keep. The activations of later MLPs are subtracted, because they count as kept but do not exist yet.
    """
    found = [op for kind in kinds for op in operations(job, kind)]
    last = max((place for place, op in enumerate(found) if op.scores), default=None)
    if job.layers is not LayerKind.LOCAL or last is None:
        return 0.0
    later = sum(sum(op.keeps) for op in found[last:] if op.name in ("up", "activation"))
    return max(0.0, SOFTMAX_IN_PASS * job.scores - later)
