"""What one transformer layer keeps of a microbatch for its backward, and what its passes need for a moment.

Bytes on one rank. docs/cost_model.md has the same figures as a table, with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_vp.cost.shapes import Job, Recompute
from megatron_vp.jobs.layer_kind import LayerKind

WORKING_SET = 24.5
"""Of the paper's layers: bytes per token and hidden unit that the backward of one layer needs on top."""

SPLIT_BACKWARD = 34
"""The same where the backward is split: one more layer that waits for its W."""

DROPPED = 1
"""Bytes per score of the mask of attention dropout. The scores that are left are kept as well, in the model's dtype."""

SOFTMAX_IN_PASS = 6
"""Bytes per score that Megatron's local attention without Apex needs for a moment, besides the softmax it keeps."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer and microbatch.

    kept: from F to B. waiting: from B to W, where the backward is split. forward, backward: needed in the pass, on top
    of what is kept; a backward that computes the layer again has all of it there. once: a buffer of the rank.
    """

    kept: float
    waiting: float
    forward: float
    backward: float
    once: float = 0.0


def layer_activations(job: Job) -> float:
    """Bytes that one layer keeps from F to B: 34 per token and hidden unit for a plain GPT in 16 bits with dropout and
    fused attention (Korthikanti et al., 2022, equation 2 without the attention scores).
    """
    if job.recompute is Recompute.FULL:
        return job.tokens * job.element_bytes * job.model.hidden / (job.tensor if job.sequence_parallel else 1)
    common = _common_activations(job)
    return common if job.layers is LayerKind.PAPER else common + _further_activations(job)


def layer_memory(job: Job, split: bool) -> LayerMemory:
    """The memory of one layer; `split`: its weight gradients are computed in a pass W."""
    kept = layer_activations(job)
    if job.layers is LayerKind.PAPER:
        unit = job.tokens * job.model.hidden / (job.tensor if job.sequence_parallel else 1)
        return LayerMemory(kept, kept, 0.0, (WORKING_SET + (SPLIT_BACKWARD if split else 0)) * unit)
    # The MLP's backward holds most: the gradient of the first matrix's result. The input of the second one is gone by
    # then, unless W needs it.
    model = job.model
    inner = job.tokens * model.mlps_per_token * job.element_bytes * model.ffn / job.tensor
    backward = inner * ((2 if model.gated else 1) + split)
    if job.recompute is Recompute.FULL:
        backward += layer_activations(replace(job, recompute=Recompute.NONE))
    scores, once = 0.0, 0.0
    if job.layers is LayerKind.LOCAL:
        scores = _scores(job)
        once = job.element_bytes * scores
    if job.sequence_parallel and job.tensor > 1:
        # A product's gathered input; in the backward its whole gradient, too, and the rank's part of that.
        gathered = job.tokens * job.element_bytes * model.hidden
        once += gathered
        backward += gathered * (1 + 1 / job.tensor)
    # W needs the inputs of all products and the gradients of their results: as many elements as a layer keeps.
    waiting = _common_activations(replace(job, model=replace(model, dropout=False)))
    if job.sequence_parallel:
        # But of the attention's last product, and of a dense MLP's, the result's gradient is gathered.
        gathered = (1 if model.experts else 2) * job.tokens * job.element_bytes * model.hidden
        waiting += gathered * (1 - 1 / job.tensor)
    return LayerMemory(
        kept=kept,
        waiting=waiting,
        # Attention runs before the MLP keeps anything.
        forward=max(0.0, SOFTMAX_IN_PASS * scores - inner * (3 if model.gated else 2)),
        backward=backward,
        once=once,
    )


def _common_activations(job: Job) -> float:
    """What layers of every kind keep."""
    model, wide, t = job.model, job.element_bytes, job.tensor
    # Inputs of both norms and of the projections they feed; masks of both dropouts.
    shared = wide * 2 * model.hidden + model.hidden * (wide + 2 * model.dropout)
    keys = max(model.keys // t, model.head_size)
    # Queries, keys, values, the result and its log-sum-exp; of the MLP the first product and the second one's input.
    attention = wide * (2 * model.queries / t + 2 * keys) + 4 * model.heads / t
    mlp = model.mlps_per_token * wide * (3 if model.gated else 2) * model.ffn / t
    shared += wide * model.hidden * (model.mlps_per_token if model.experts else 1)
    return job.tokens * (shared / (t if job.sequence_parallel else 1) + attention + mlp)


def _further_activations(job: Job) -> float:
    """What Transformer Engine's or Megatron's local layers keep besides."""
    model, wide, t = job.model, job.element_bytes, job.tensor
    local = job.layers is not LayerKind.ENGINE
    keys, groups = max(model.keys // t, model.head_size), max(model.kv_groups // t, 1)
    elements = model.mlps_per_token * job.glu_intermediates * model.ffn / t
    statistics = 0.0
    if model.query_key_norms:
        # The inputs of these norms. Transformer Engine copies them out of the projection's result, of which a local
        # layer keeps all, and a copy of the queries where several share a group.
        elements += model.queries / t + keys
        if local:
            elements += keys + (model.queries / t if model.kv_groups < model.heads else 0)
        statistics = 4 * (model.heads / t + groups)
    further = job.tokens * (wide * elements + statistics)
    if local and model.rotary:
        # Sines and cosines in 16 bits, for queries and for keys.
        further += 4 * wide * model.head_size * job.sequence / job.context
    if job.layers is LayerKind.LOCAL_SDPA and job.context > 1:
        # Keys and values of whole sequences in place of the rank's part, and the result once more, in two pieces.
        further += job.tokens * wide * (2 * keys * (job.context - 1) + model.queries / t)
    if job.layers is LayerKind.LOCAL:
        softmax = wide + (4 if job.wide_softmax and wide < 4 else 0)
        dropped = job.attention_dropout * (wide + DROPPED)
        # Keys and values are repeated for all heads of a group.
        further += job.tokens * wide * 2 * (model.queries / t - keys)
        further += (softmax + dropped) * _scores(job) - 4 * job.tokens * model.heads / t
    return further


def _scores(job: Job) -> float:
    return job.tokens * job.sequence * job.model.heads / job.tensor
