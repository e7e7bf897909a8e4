"""Counts floating point operations and parameters from the sizes of the model's matrices."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_vp.cost.sizes.layer_types import LayerType, mlp_of, model_layers
from megatron_vp.cost.sizes.shapes import Job


class Matrix(NamedTuple):
    """Weight matrices of one shape on one rank: `copies` matrices, each applied to `tokens` tokens per microbatch."""

    inputs: int
    outputs: int
    tokens: float
    copies: int = 1

    @property
    def weights(self) -> int:
        """Parameters of all `copies`."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops(self) -> float:
        """FLOPs of one microbatch's forward."""
        return 2 * self.tokens * self.inputs * self.outputs * self.copies


@lru_cache(maxsize=4096)
def layer_matrices(job: Job, kind: LayerType = LayerType.WHOLE) -> tuple[Matrix, ...]:
    """The matrices of one layer on one rank."""
    model, t, tokens = job.model, job.tensor, job.tokens
    matrices = list(attention_matrices(job)) if kind.attends else []
    mlp = mlp_of(model, kind)
    if mlp is not None:
        copies = max(1, mlp.experts // job.expert)
        if mlp.shared:
            matrices.append(Matrix(model.hidden, (2 if model.gated else 1) * mlp.shared // t, tokens))
            matrices.append(Matrix(mlp.shared // t, model.hidden, tokens))
        t = job.expert_tensor if mlp.experts else t
        routed = tokens * mlp.per_token / copies * t / job.tensor
        if mlp.experts:
            matrices.append(Matrix(model.hidden, mlp.experts, tokens))
        matrices.append(Matrix(model.hidden, (2 if model.gated else 1) * mlp.width // t, routed, copies))
        matrices.append(Matrix(mlp.width // t, model.hidden, routed, copies))
    return tuple(matrices)


def attention_matrices(job: Job) -> tuple[Matrix, ...]:
    """The matrices of one layer's attention on one rank.

    In latent attention, every tensor rank holds the complete down-projection matrices; with sequence parallelism, the
    rank multiplies these matrices only with its own tokens.
    """
    model, t, tokens, latent = job.model, job.tensor, job.tokens, job.model.latent
    result = Matrix(model.results // t, model.hidden, tokens)
    if latent is None:
        keys = max(model.keys // t, model.head_size)
        return Matrix(model.hidden, model.queries // t + 2 * keys, tokens), result
    own = tokens / (t if job.sequence_parallel else 1)
    widths = model.keys - model.heads * latent.rotary + model.values
    from_keys = Matrix(model.hidden, latent.key_rank + latent.rotary, own), Matrix(latent.key_rank, widths // t, tokens)
    if not latent.query_rank:
        return Matrix(model.hidden, model.queries // t, tokens), *from_keys, result
    compress = Matrix(model.hidden, latent.query_rank, own)
    return compress, Matrix(latent.query_rank, model.queries // t, tokens), *from_keys, result


def attention_flops(job: Job, kind: LayerType = LayerType.WHOLE) -> float:
    """FLOPs of attention scores and weighted values in one layer's forward on one rank, not halved for causality."""
    widths = job.model.queries + job.model.results
    return 2 * job.tokens * job.sequence * widths / job.tensor if kind.attends else 0.0


def layer_flops(job: Job, kind: LayerType = LayerType.WHOLE) -> float:
    """FLOPs of one layer's forward for a microbatch on one rank, with attention not halved for causality."""
    return sum(matrix.flops for matrix in layer_matrices(job, kind)) + attention_flops(job, kind)


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
    for kind, count in model_layers(job).items():
        mlp = mlp_of(job.model, kind)
        router = 2 * job.tokens * job.model.hidden * mlp.experts if mlp else 0.0
        attention = attention_flops(job, kind)
        forward += count * (layer_flops(job, kind) - router - (1 - of_attention) * attention)
    return 3 * forward * job.microbatches * job.gpus_per_stage


def layer_weights(job: Job, kind: LayerType = LayerType.WHOLE) -> int:
    """Parameters of one layer on one rank, including its norms."""
    norms = int(2 * kind.share)
    return sum(matrix.weights for matrix in layer_matrices(job, kind)) + norms * 2 * job.model.hidden


def expert_weights(job: Job, kind: LayerType = LayerType.WHOLE) -> int:
    """Parameters of one layer's experts on one rank. The experts' weights are the layer's last two matrices."""
    mlp = mlp_of(job.model, kind)
    return sum(matrix.weights for matrix in layer_matrices(job, kind)[-2:]) if mlp and mlp.experts else 0
