"""Floating point operations and weights: products and sums of the model's matrices, nothing else."""

from __future__ import annotations

from typing import NamedTuple

from megatron_vp.cost.shapes import Job


class Matrix(NamedTuple):
    """A weight on one rank: `copies` of it, and the tokens of a microbatch that go through one copy."""

    inputs: int
    outputs: int
    tokens: float
    copies: int = 1

    @property
    def weights(self) -> int:
        """Parameters of all copies on the rank."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops(self) -> float:
        """Of the forward of one microbatch."""
        return 2 * self.tokens * self.inputs * self.outputs * self.copies


def layer_matrices(job: Job) -> tuple[Matrix, ...]:
    """The matrices of one transformer layer on one rank."""
    model, t, tokens = job.model, job.tensor, job.tokens
    keys = max(model.keys // t, model.head_size)
    matrices = [
        Matrix(model.hidden, model.queries // t + 2 * keys, tokens),
        Matrix(model.queries // t, model.hidden, tokens),
    ]
    copies = max(1, model.experts // job.expert)
    routed = tokens * model.mlps_per_token / copies
    if model.experts:
        matrices.append(Matrix(model.hidden, model.experts, tokens))
    matrices.append(Matrix(model.hidden, (2 if model.gated else 1) * model.ffn // t, routed, copies))
    matrices.append(Matrix(model.ffn // t, model.hidden, routed, copies))
    return tuple(matrices)


def attention_flops(job: Job) -> float:
    """Scores and weighted values of one layer's forward on one rank, no causal half left out."""
    return 4 * job.tokens * job.sequence * job.model.queries / job.tensor


def layer_flops(job: Job) -> float:
    """One layer's forward of one microbatch on one rank, attention in full."""
    return sum(matrix.flops for matrix in layer_matrices(job)) + attention_flops(job)


def output_flops(job: Job) -> float:
    """The output layer's forward of one microbatch on the tensor ranks of one stage, a rank's share."""
    return 2 * job.tokens * job.model.hidden * job.model.vocab / job.tensor


def model_flops(job: Job) -> float:
    """FLOPs of one iteration of the whole job, as the paper counts them for its MFU.

    3 x (output layer + layers), attention in full; neither the input embedding nor recomputation counts.
    """
    forward = output_flops(job) + job.model.layers * layer_flops(job)
    return 3 * forward * job.microbatches * job.gpus_per_stage


def layer_weights(job: Job) -> int:
    """Parameters of one transformer layer on one rank, its two norms included."""
    return sum(matrix.weights for matrix in layer_matrices(job)) + 4 * job.model.hidden


def expert_weights(job: Job) -> int:
    """Those of them that belong to experts, the last two matrices of a layer that has any."""
    return sum(matrix.weights for matrix in layer_matrices(job)[-2:]) if job.model.experts else 0
