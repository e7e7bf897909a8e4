"""Counts the floating point operations of a whole iteration."""

from __future__ import annotations

from dataclasses import replace

from megatron_vp.cost.layers.layer_operations import operations
from megatron_vp.cost.layers.layer_types import stage_layers
from megatron_vp.cost.layers.shapes import Job


def output_flops(job: Job) -> float:
    """FLOPs of the output layer's forward for a microbatch on one tensor rank of the last stage."""
    return 2 * job.output_tokens * job.model.hidden * job.model.vocab / job.tensor


def model_flops(job: Job) -> float:
    """FLOPs of one iteration of the whole job as Megatron's `--log-throughput` counts them.

    The count is three times the forward FLOPs of the model's layers, including the output layer. Only the causal half
    of attention is counted. Multi-token prediction adds its norms and the matrix product that combines hidden states
    with embeddings. Latent attention adds its norms. The input embedding, routers and recomputation are not counted.
    For an MLP with quick GeGLU, this function counts three matrices, but Megatron counts only two.
    """
    # Count as if nothing were split over ranks: with more tensor ranks than key-value groups, several ranks compute the
    # same keys.
    whole = replace(job, tensor=1, context=1, expert=1, expert_tensor=1, sequence_parallel=False)
    hidden, heads = job.model.hidden, 0 if job.model.is_hybrid else len(job.model.mtp_heads)
    joined = 2 * whole.tokens * heads * (3 * hidden + 2 * hidden**2)
    if job.model.latent and not job.model.is_hybrid:
        ranks = job.model.latent.query_rank + job.model.latent.key_rank
        joined += 2 * whole.tokens * (job.model.layers + heads) * ranks
    return 3 * joined * job.microbatches * job.data + _flops(whole, 0.5)


def paper_flops(job: Job) -> float:
    """FLOPs of one iteration of the whole job as the paper's MFU counts them: attention is not halved for causality."""
    return _flops(job, 1.0)


def _flops(job: Job, of_attention: float) -> float:
    forward = output_flops(job)
    for kind, count in stage_layers(job, (job.model.layers,))[0].items():
        own = (op for op in operations(job, kind) if op.name not in ("router", "joint", "shared gate"))
        forward += count * sum(op.flops - (1 - of_attention) * op.scores for op in own)
    return 3 * forward * job.microbatches * job.gpus_per_stage
