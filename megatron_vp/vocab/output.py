"""Output layer of one shard: passes S and T of both algorithms (Yeung et al., arXiv 2411.05288, Algorithms 1 and 2).

    S   Y = X W^T      a_i = max_j Y_ij      E_ij = exp(Y_ij - a_i)      l_i = sum_j E_ij      z_i = Y[i, y_i]
    T   D_ij = c_i E_ij - onehot_ij  with  c_i = exp(a_i - A_i) / L_i    dW += D^T (g X)
    dX  = g * sum over shards of D W     (the receiving stage applies the row factor g)

D is the derivative of the loss with respect to the logits, W and dW are the shard's weight and its gradient, and A and
L are a and l over the whole vocabulary. vocab-1 computes D W in T, once A and L are known. vocab-2 computes E W in S,
before they are known, and rescales the rows of E W afterwards, so that one barrier is enough.

A z-loss, label smoothing and a softcap change D (see `megatron_vp.vocab.loss`). Only label smoothing costs time: it
subtracts a number u from every entry of D. This adds a pass over W for dX, and one over dW.

D is never formed. Instead, T overwrites the targets' entries of E with those of D, divided by c, so that one GEMM, E^T
(c g X), gives all of D^T (g X). The row factors c and g are applied to X, because X is smaller than E by a factor of
(V/p) / h.

With a frozen weight (`requires_grad` is False), only dX is computed, and X and E are freed early (see `PendingOutput`).

If the training loss depends on entropies (vocab-1 only), D contains their gradients and g, and T writes it into E.

Logits are in the model's dtype, as the GEMM returns them. Statistics, exponentials and the targets' entries of D are
computed in fp32. Between S and T, E is kept in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_vp.vocab.loss import CROSS_ENTROPY, LINEAR, MAX, Derivative, GlobalStatistics, TokenLoss, statistics_dtype
from megatron_vp.vocab.operations import main_grad, operations_for
from megatron_vp.vocab.shards import VocabShards


@dataclass
class PendingOutput:
    """State that a shard keeps for a microbatch between S and T: the matrices E [n, V/p] and X [n, h], and vectors [n].

    If the weight is frozen, X is always empty, and E becomes empty once E W has been computed. Otherwise, T overwrites
    E.
    """

    x_nh: torch.Tensor
    exp_nv: torch.Tensor
    statistics_3n: torch.Tensor
    target_n: torch.Tensor
    target_logit_n: torch.Tensor
    loss: TokenLoss
    vocab_size: int
    softcap: float = 0.0

    def derivative(self, total: GlobalStatistics) -> Derivative:
        """The factors that turn E into D, once the statistics of the whole vocabulary are known."""
        largest_n = self.statistics_3n[MAX]
        vectors = largest_n, self.target_n, self.target_logit_n
        return Derivative(*vectors, total, self.loss, self.vocab_size, self.softcap / self.loss.temperature)


class OutputLayer(nn.Module):
    """One shard of the output layer: rows [V/p, h] of the weight, and the passes S and T over these rows.

    Gradients are added directly to `weight.main_grad` (Megatron's accumulation buffer, any float dtype), without
    autograd.

    softcap: k if the model caps its logits to k tanh(logit / k), otherwise 0; must be 0 with label smoothing.
    """

    def __init__(self, weight: nn.Parameter, shards: VocabShards, index: int, softcap: float = 0.0) -> None:
        super().__init__()
        self.softcap = softcap
        self.weight = weight
        self.shards = shards
        self.index = index

    @torch.no_grad()
    def forward(self, x_nh: torch.Tensor, labels_n: torch.Tensor, loss: TokenLoss = CROSS_ENTROPY) -> PendingOutput:
        """Run pass S of vocab-1, or the first part of S of vocab-2; `unscaled_input_gradient` is the second part.

        Args:
            x_nh: output of the last stage, [n, h], in the model's dtype.
            labels_n: global token ids, int64 [n]. With an id outside the vocabulary, the target's logit counts as 0, as
                in Megatron's vocabulary-parallel cross entropy, so the cross entropy is the log-sum-exp.
        """
        vocab_size = self.shards.vocab_size
        assert not (self.softcap and loss.label_smoothing), (
            "label smoothing is not supported with a softcap, whose slope would turn the smoothing term, a rank-one "
            "matrix, into a matrix of higher rank"
        )
        exp_nv = x_nh @ self.weight.t()
        if self.weight.shape[0]:
            weights = loss.target_weight(vocab_size), loss.logit_weight(vocab_size)
            statistics_3n, target_n, target_logit_n = operations_for(exp_nv).exponentiate_(
                exp_nv,
                labels_n,
                self.shards.start(self.index),
                *weights,
                self.softcap,
                loss.temperature,
                entropy=loss.entropy,
                slope=not loss.entropy_gradient,
            )
        else:
            statistics_3n, target_n, target_logit_n = _of_no_rows(exp_nv, labels_n, loss.statistics)
        kept_nh = x_nh if self.weight.requires_grad else x_nh.new_empty(0, x_nh.shape[1])
        return PendingOutput(kept_nh, exp_nv, statistics_3n, target_n, target_logit_n, loss, vocab_size, self.softcap)

    @torch.no_grad()
    def unscaled_input_gradient(self, pending: PendingOutput) -> torch.Tensor:
        """Complete pass S of vocab-2: compute E W, [n, h] in the model's dtype, without the global statistics."""
        product_nh = pending.exp_nv @ self.weight
        if not self.weight.requires_grad:
            pending.exp_nv = pending.exp_nv.new_empty(0, len(self.weight))
        return product_nh

    @torch.no_grad()
    def rescaled_input_gradient(
        self, unscaled_nh: torch.Tensor, pending: PendingOutput, total: GlobalStatistics
    ) -> torch.Tensor:
        """Use the global statistics to turn E W [n, h] in place into this shard's part of dX / g."""
        if self.weight.shape[0]:
            operations_for(unscaled_nh).rescale_(unscaled_nh, self.weight, pending.derivative(total))
            if smoothing := pending.loss.logit_weight(pending.vocab_size):
                unscaled_nh -= smoothing * self.weight.sum(0, dtype=pending.statistics_3n.dtype)
        return unscaled_nh

    @torch.no_grad()
    def t_pass(
        self, pending: PendingOutput, total: GlobalStatistics, token_loss_grad_n: torch.Tensor, *, input_gradient: bool
    ) -> torch.Tensor | None:
        """Pass T: accumulate the weight gradient into `main_grad`, unless the weight is frozen.

        Args:
            pending: the state that S left; T overwrites it.
            token_loss_grad_n: g, the derivative of the training loss with respect to each token's loss, fp32 [n]; g
                includes the loss mask, the averaging, the loss scale and the division by the temperature. If the loss
                has an entropy gradient, g is followed by the derivatives with respect to the entropies, [2, n].
            input_gradient: whether to return this shard's part of dX / g, [n, h], which only vocab-1 needs from T. With
                an entropy gradient, the part is of dX itself.
        """
        part_nh = None
        if pending.loss.entropy_gradient:
            exp_nv, operations = pending.exp_nv, operations_for(pending.exp_nv)
            if self.weight.shape[0]:
                operations.enter_derivative_(exp_nv, token_loss_grad_n, pending.derivative(total))
                if self.weight.requires_grad:
                    operations.add_product_(main_grad(self.weight), exp_nv, pending.x_nh)
            return exp_nv @ self.weight
        if input_gradient:
            part_nh = self.rescaled_input_gradient(self.unscaled_input_gradient(pending), pending, total)
        if self.weight.shape[0] and self.weight.requires_grad:
            x_nh, operations = pending.x_nh, operations_for(pending.x_nh)
            weighed_nh = operations.enter_targets_(pending.exp_nv, x_nh, token_loss_grad_n, pending.derivative(total))
            operations.add_product_(main_grad(self.weight), pending.exp_nv, weighed_nh)
            if smoothing := pending.loss.logit_weight(pending.vocab_size):
                gradient_n, wide_nh = (each.to(pending.statistics_3n.dtype) for each in (token_loss_grad_n, x_nh))
                main_grad(self.weight).sub_(smoothing * (gradient_n @ wide_nh))
        return part_nh


def _of_no_rows(
    logits_nv: torch.Tensor, labels_n: torch.Tensor, statistics: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result of `exponentiate_` for an empty shard."""
    statistics_3n = logits_nv.new_zeros((statistics, len(labels_n)), dtype=statistics_dtype(logits_nv.dtype))
    statistics_3n[MAX].fill_(-torch.inf)
    return statistics_3n, torch.full_like(labels_n, -1), torch.zeros_like(statistics_3n[LINEAR])
