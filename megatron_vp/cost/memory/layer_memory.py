"""Memory of one transformer layer: activations that it keeps for the backward, and temporary buffers of its passes.

All figures are bytes on one rank. docs/evidence/predictions.md compares predictions with the bytes counted by
`replay --shapes-only`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_vp.cost.sizes.layer_types import LayerType, MlpRecompute, mlp_of, mlp_recompute, type_of
from megatron_vp.cost.sizes.shapes import Job, Recompute
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.schedule.placed_copies import LEAST_OFFLOADED

WORKING_SET = 24.5
"""Bytes of temporary tensors per token and hidden unit in one layer's backward, in the paper's code."""

SPLIT_BACKWARD = 34
"""Additional bytes per token and hidden unit during a split backward, in the paper's code: the tensors that one
finished layer still keeps for W.
"""

DROPPED = 1
"""Bytes per score for the attention dropout mask. The scores after dropout are kept as well, in the model's dtype."""

SOFTMAX_IN_PASS = 6
"""Temporary bytes per score in Megatron's local attention without Apex, in addition to the kept softmax result."""


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer in bytes, for one microbatch.

    kept: activations that are kept from F to B.
    waiting: tensors that are kept from B to W, if the backward is split.
    forward, backward: temporary bytes in the pass, in addition to `kept`. With full recomputation, `backward` includes
        all activations of the layer.
    once: a buffer that a rank allocates once for all its layers.
    """

    kept: float
    waiting: float
    forward: float
    backward: float
    once: float = 0.0


def layer_activations(job: Job, kind: LayerType = LayerType.WHOLE) -> float:
    """Bytes that one layer keeps from F to B.

    A plain GPT layer in 16 bits with dropout and fused attention keeps 34 bytes per token and hidden unit (Korthikanti
    et al., 2022, equation 2 without the attention scores).
    """
    if job.recompute is Recompute.FULL:
        return job.tokens * job.element_bytes * job.model.hidden / (job.tensor if job.sequence_parallel else 1)
    common = _common_activations(job, kind)
    if job.layers is LayerKind.PAPER:
        return job.kept_bytes * job.tokens * job.model.hidden or common
    return common + _further_activations(job, kind) - recomputed_activations(job, kind)


def small_activations(job: Job, kind: LayerType = LayerType.WHOLE) -> float:
    """Bytes of activations that stay on the device when a layer is offloaded: tensors too small to be worth a copy."""
    between, inside = _common_tensors(job, kind)
    shared = job.tensor if job.sequence_parallel else 1
    tensors = [job.tokens * each / shared for each in between] + [job.tokens * each for each in inside]
    if kind.attends and job.layers is not LayerKind.PAPER:
        model, t = job.model, job.tensor
        if model.query_key_norms:
            widths = model.queries / t, max(model.keys // t, model.head_size)
            tensors += [job.tokens * job.element_bytes * width for width in widths]
            tensors += [job.tokens * 4 * width / model.head_size for width in widths]
        if model.rotary and job.layers is not LayerKind.ENGINE:
            tensors += [job.element_bytes * model.head_size * job.sequence / job.context] * 4
    return sum(each for each in tensors if each < LEAST_OFFLOADED)


def recomputed_activations(job: Job, kind: LayerType = LayerType.WHOLE) -> float:
    """Bytes of activations that a layer does not keep because its backward recomputes part of its MLPs.

    A fully recomputed MLP keeps only its input. If one module contains the MLP and the norm before it, only the norm's
    input is kept.
    """
    again, model, mlp = mlp_recompute(job, kind), job.model, mlp_of(job.model, kind)
    if again is MlpRecompute.NONE or mlp is None:
        return 0.0
    inner = _inner(job, kind)
    if again is MlpRecompute.ACTIVATION:
        return inner * (1 + job.glu_intermediates)
    norm_apart = bool(mlp.experts) or job.layers is not LayerKind.ENGINE
    inputs = job.tokens * job.element_bytes * model.hidden / (job.tensor if job.sequence_parallel else 1)
    return inputs * (mlp.per_token - norm_apart) + inner * ((3 if model.gated else 2) + job.glu_intermediates)


@lru_cache(maxsize=4096)
def layer_memory(job: Job, split: bool, kind: LayerType = LayerType.WHOLE) -> LayerMemory:
    """The memory of one layer; `split`: whether its weight gradients are computed in a separate pass W."""
    kept = layer_activations(job, kind)
    if job.layers is LayerKind.PAPER:
        unit = job.tokens * job.model.hidden / (job.tensor if job.sequence_parallel else 1)
        return LayerMemory(kept, kept, 0.0, (WORKING_SET + (SPLIT_BACKWARD if split else 0)) * unit)
    # A layer's memory peaks in the MLP's backward, when the gradient of the first matrix product's output exists. By
    # then, the input of the second product has been freed, unless W needs it. If a layer has no MLPs, its backward
    # holds the gradients of attention's queries, keys, values and output.
    model = job.model
    inner = _inner(job, kind)
    if mlp_of(model, kind):
        backward = inner * ((2 if model.gated else 1) + split)
    else:
        keys = max(model.keys // job.tensor, model.head_size)
        widths = (model.queries + model.results) / job.tensor + keys + max(model.values // job.tensor, model.value_size)
        backward = job.tokens * job.element_bytes * widths
    if job.recompute is Recompute.FULL:
        backward += layer_activations(replace(job, recompute=Recompute.NONE, recompute_modules=frozenset()), kind)
    backward += recomputed_activations(job, kind)
    scores, once = 0.0, 0.0
    if job.layers is LayerKind.LOCAL and kind.attends:
        scores = _scores(job)
        once = job.element_bytes * scores
    if job.sequence_parallel and job.tensor > 1:
        # With sequence parallelism, each column-parallel layer gathers its input. The backward also holds the gradient
        # of the gathered input, and the slice of this gradient that stays on the rank.
        gathered = job.tokens * job.element_bytes * model.hidden
        once += gathered
        backward += gathered * (1 + 1 / job.tensor)
    # W needs the inputs of the matrix products and the gradients of their outputs. Together, these tensors have as many
    # elements as the activations that a layer keeps.
    waiting = _common_activations(replace(job, model=replace(model, dropout=False)), kind)
    if job.sequence_parallel:
        # The output gradients of attention and of a dense MLP are gathered over the tensor ranks before W uses them.
        mlp = mlp_of(model, kind)
        gathered = (kind.attends + bool(mlp and not mlp.experts)) * job.tokens * job.element_bytes * model.hidden
        waiting += gathered * (1 - 1 / job.tensor)
    return LayerMemory(
        kept=kept,
        waiting=waiting,
        # While attention runs, the MLP's activations do not exist yet, so they are subtracted.
        forward=max(0.0, SOFTMAX_IN_PASS * scores - inner * (3 if model.gated else 2)),
        backward=backward,
        once=once,
    )


@dataclass(frozen=True)
class PassMemory:
    """Temporary bytes in the passes of a stage, in addition to what its layers keep; see `LayerMemory`."""

    forward: float
    backward: float


def pass_memory(job: Job, split: bool, letters: str) -> PassMemory:
    """The temporary bytes in a stage's passes. `letters` is the stage's part of the model's layer pattern, if there is
    one.

    The forward needs the bytes of the last attention layer. The activations of later MLPs are subtracted, because they
    count as kept but do not exist yet. The backward needs the bytes of the largest MLP, or those of attention if the
    stage has no MLPs.
    """
    if not job.model.pattern:
        layer = layer_memory(job, split)
        return PassMemory(layer.forward, layer.backward)
    kinds = list(map(type_of, letters))
    memory = {kind: layer_memory(job, split, kind) for kind in set(kinds)}
    if not job.model.is_hybrid:
        most = (max((getattr(each, name) for each in memory.values()), default=0.0) for name in ("forward", "backward"))
        return PassMemory(*most)
    forward = 0.0
    if LayerType.ATTENTION in memory:
        after = kinds[len(kinds) - kinds[::-1].index(LayerType.ATTENTION) :]
        inner = sum(_inner(job, kind) for kind in after)
        forward = max(0.0, memory[LayerType.ATTENTION].forward - inner * (3 if job.model.gated else 2))
    mlps = [each.backward for kind, each in memory.items() if kind is not LayerType.ATTENTION]
    return PassMemory(forward, max(mlps or (each.backward for each in memory.values()), default=0.0))


def once_memory(job: Job, split: bool, kinds: Iterable[LayerType]) -> float:
    """Bytes of the buffers that a rank allocates once for all its layers. `kinds` are the types of these layers."""
    return max((layer_memory(job, split, kind).once for kind in kinds), default=0.0)


def _inner(job: Job, kind: LayerType) -> float:
    """Bytes of one tensor between an MLP's two matrix products, summed over each token's experts."""
    mlp = mlp_of(job.model, kind)
    return job.tokens * mlp.per_token * job.element_bytes * mlp.width / job.tensor if mlp else 0.0


def _common_tensors(job: Job, kind: LayerType) -> tuple[list[float], list[float]]:
    """Bytes per token of each activation tensor that every layer implementation keeps.

    The first list is for tensors outside tensor-parallel regions. Sequence parallelism splits only these tensors. The
    second list is for tensors inside the regions.
    """
    model, wide, t, mlp = job.model, job.element_bytes, job.tensor, mlp_of(job.model, kind)
    between: list[float] = []
    inside: list[float] = []
    if kind.attends:
        # The tensors in `between` are the inputs of the norm and of the projection that follows it, and the dropout
        # mask. Those in `inside` are attention's queries, result, keys, values and log-sum-exp.
        keys, values = max(model.keys // t, model.head_size), max(model.values // t, model.value_size)
        between += [wide * model.hidden, wide * model.hidden, model.dropout * model.hidden]
        inside += [wide * model.queries / t, wide * model.results / t, float(wide * keys), float(wide * values)]
        inside.append(4 * model.heads / t)
        if model.latent:
            # Multi-latent attention also keeps the inputs and results of the norms after its down-projections.
            latent = model.latent
            between += [wide * latent.query_rank] * 2
            between += [wide * (latent.key_rank + latent.rotary), wide * latent.key_rank]
    if mlp:
        # The tensors in `between` are the inputs of the norm and of the first matrix product, and the dropout mask.
        # Those in `inside` are the output of the first product and the input of the second.
        between += [wide * model.hidden, wide * mlp.per_token * model.hidden, model.dropout * model.hidden]
        inside += [mlp.per_token * wide * mlp.width / t] * (3 if model.gated else 2)
        if mlp.shared:
            between.append(wide * model.hidden)
            inside += [wide * mlp.shared / t] * (3 if model.gated else 2)
    return between, inside


def _common_activations(job: Job, kind: LayerType) -> float:
    """Bytes of activations that every layer implementation keeps."""
    between, inside = _common_tensors(job, kind)
    return job.tokens * (sum(between) / (job.tensor if job.sequence_parallel else 1) + sum(inside))


def _further_activations(job: Job, kind: LayerType) -> float:
    """Bytes of activations that the job's layer implementation keeps in addition to `_common_activations`."""
    model, wide, t, mlp = job.model, job.element_bytes, job.tensor, mlp_of(job.model, kind)
    local = job.layers is not LayerKind.ENGINE
    keys, groups = max(model.keys // t, model.head_size), max(model.kv_groups // t, 1)
    elements = job.glu_intermediates * (mlp.per_token * mlp.width + mlp.shared) / t if mlp else 0.0
    if not kind.attends:
        return job.tokens * wide * elements
    statistics = 0.0
    if model.query_key_norms:
        # The norms of queries and keys keep their inputs. Transformer Engine copies these inputs out of the
        # projection's result. A local layer keeps the whole result and, with grouped-query attention, also a copy of
        # the queries.
        elements += model.queries / t + keys
        if local:
            elements += keys + (model.queries / t if model.kv_groups < model.heads else 0)
        statistics = 4 * (model.heads / t + groups)
    further = job.tokens * (wide * elements + statistics)
    if local and model.rotary:
        # Sines and cosines are kept in the model's dtype, once for queries and once for keys.
        rotated = model.latent.rotary if model.latent else model.head_size
        further += 4 * wide * rotated * job.sequence / job.context
    if job.layers is LayerKind.LOCAL_SDPA and job.context > 1:
        # With context parallelism, attention keeps keys and values of whole sequences, and a copy of its result.
        values = max(model.values // t, model.value_size)
        further += job.tokens * wide * ((keys + values) * (job.context - 1) + model.results / t)
    if job.layers is LayerKind.LOCAL:
        softmax = wide + (4 if job.wide_softmax and wide < 4 else 0)
        dropped = job.attention_dropout * (wide + DROPPED)
        # Keys and values are repeated for all heads of a group.
        further += job.tokens * wide * 2 * (model.queries / t - keys)
        further += (softmax + dropped) * _scores(job) - 4 * job.tokens * model.heads / t
    return further


def _scores(job: Job) -> float:
    return job.tokens * job.sequence * job.model.heads / job.tensor
