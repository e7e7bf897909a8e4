"""Output layer of one shard: passes S and T of both algorithms (Yeung et al., arXiv 2411.05288, Algorithms 1 and 2).

    S   Y = X W^T      a_i = max_j Y_ij      E_ij = exp(Y_ij - a_i)      l_i = sum_j E_ij      z_i = Y[i, y_i]
    T   D_ij = c_i E_ij - onehot_ij  with  c_i = exp(a_i - A_i) / L_i    dW += D^T (g X)
    dX  = g * sum over shards of D W     (the receiving stage applies the row factor g)

vocab-1 forms D W in T, from D itself. vocab-2 forms E W in S, before the global statistics are known, and rescales its
rows afterwards, so that one barrier is enough.

Precision: logits in the model's dtype, as the GEMM returns them; statistics and exponentials in fp32; E kept between S
and T in the model's dtype. The target's column never enters E: c E - 1 cancels when the model is sure, so its entry of
D is taken from z in fp32, exp(z - A) / L - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_vp.vocab.shards import VocabShards
from megatron_vp.vocab.statistics import MAX, SUM, TARGET, GlobalStatistics, statistics_dtype

ROWS_PER_BLOCK = 1024
"""Tokens whose logits are widened to fp32 at a time: bounds the temporary to 4 bytes x this x V/p."""


@dataclass
class PendingOutput:
    """What a shard keeps of one microbatch between S and T: E [n, V/p], X [n, h] and four vectors [n]."""

    x_nh: torch.Tensor
    exp_nv: torch.Tensor
    statistics_3n: torch.Tensor
    target_n: torch.Tensor
    owned_n: torch.Tensor

    def row_scale(self, total: GlobalStatistics) -> torch.Tensor:
        """The factor c that turns this shard's E into softmax entries, [n]."""
        return total.probability(self.statistics_3n[MAX])

    def target_entry(self, total: GlobalStatistics) -> torch.Tensor:
        """Entry of D at the target, exp(z - A) / L - 1; zero where the target belongs to another shard, [n]."""
        return torch.where(self.owned_n, total.probability(self.statistics_3n[TARGET]) - 1, 0)


class OutputLayer(nn.Module):
    """One shard of the output layer: rows [V/p, h] of the weight, and the passes S and T over it.

    Gradients go straight into `weight.main_grad` (Megatron's accumulation buffer, any float dtype), outside autograd.
    """

    def __init__(self, weight: nn.Parameter, shards: VocabShards, index: int) -> None:
        super().__init__()
        self.weight = weight
        self.shards = shards
        self.index = index

    @torch.no_grad()
    def forward(self, x_nh: torch.Tensor, labels_n: torch.Tensor) -> PendingOutput:
        """Pass S of either algorithm; vocab-2 adds `unscaled_input_gradient`.

        Args:
            x_nh: output of the last stage, [n, h], in the model's dtype.
            labels_n: global token ids, int64 [n]. An id outside the vocabulary has no target: its loss is the
                log-sum-exp, as in Megatron's vocabulary-parallel cross entropy.

        Returns:
            The state that T needs, with the packed statistics [3, n] for barrier C1.
        """
        exp_nv = x_nh @ self.weight.t()
        rows = self.weight.shape[0]
        local_n = labels_n - self.shards.start(self.index)
        owned_n = (local_n >= 0) & (local_n < rows)
        target_n = local_n.clamp(0, max(rows - 1, 0))
        statistics_3n = exp_nv.new_zeros((3, x_nh.shape[0]), dtype=statistics_dtype(exp_nv.dtype))
        statistics_3n[MAX].fill_(-torch.inf)
        if rows:
            for block in range(0, exp_nv.shape[0], ROWS_PER_BLOCK):
                span = slice(block, block + ROWS_PER_BLOCK)
                _exponentiate(exp_nv[span], target_n[span], owned_n[span], statistics_3n[:, span])
        return PendingOutput(x_nh, exp_nv, statistics_3n, target_n, owned_n)

    @torch.no_grad()
    def unscaled_input_gradient(self, pending: PendingOutput) -> torch.Tensor:
        """The end of vocab-2's S: E W, [n, h] in the model's dtype, formed before the global statistics are known."""
        return pending.exp_nv @ self.weight

    @torch.no_grad()
    def rescaled_input_gradient(
        self, unscaled_nh: torch.Tensor, pending: PendingOutput, total: GlobalStatistics
    ) -> torch.Tensor:
        """Turn vocab-2's E W into this shard's part of dX / g, [n, h] in the model's dtype, once C1 is known."""
        scaled_nh = unscaled_nh * pending.row_scale(total)[:, None]
        if self.weight.shape[0]:
            scaled_nh.addcmul_(self.weight[pending.target_n], pending.target_entry(total)[:, None])
        return scaled_nh.to(pending.x_nh.dtype)

    @torch.no_grad()
    def t_pass(
        self, pending: PendingOutput, total: GlobalStatistics, row_gradient_n: torch.Tensor, *, input_gradient: bool
    ) -> torch.Tensor | None:
        """Pass T: accumulate the weight gradient into `main_grad`; vocab-1 also returns its part of dX / g, [n, h].

        Args:
            pending: the state of S; its E is overwritten with D.
            total: statistics of the whole vocabulary.
            row_gradient_n: g, the derivative of the loss by every token's loss, fp32 [n]; holds mask, averaging and
                loss scale.
            input_gradient: return D W (vocab-1).
        """
        gradient_nv = pending.exp_nv
        scale_n, entry_n = pending.row_scale(total), pending.target_entry(total)
        if self.weight.shape[0]:
            for block in range(0, gradient_nv.shape[0], ROWS_PER_BLOCK):
                span = slice(block, block + ROWS_PER_BLOCK)
                gradient_nv[span].mul_(scale_n[span, None])
                _set_target(gradient_nv[span], pending.target_n[span], pending.owned_n[span], entry_n[span])
        part_nh = gradient_nv @ self.weight if input_gradient else None
        weighted_x_nh = (pending.x_nh * row_gradient_n[:, None]).to(pending.x_nh.dtype)
        self.weight.main_grad.add_(gradient_nv.t() @ weighted_x_nh)
        return part_nh


def _exponentiate(
    logits_nv: torch.Tensor, target_n: torch.Tensor, owned_n: torch.Tensor, statistics_3n: torch.Tensor
) -> None:
    """Replace logits by E in place, its target column by zero, and fill the packed statistics."""
    wide_nv = logits_nv.to(statistics_3n.dtype)
    max_n = wide_nv.amax(-1)
    statistics_3n[MAX] = max_n
    statistics_3n[TARGET] = torch.where(owned_n, wide_nv.gather(-1, target_n[:, None]).squeeze(-1), 0)
    wide_nv = (wide_nv - max_n[:, None]).exp_()
    statistics_3n[SUM] = wide_nv.sum(-1)
    logits_nv.copy_(wide_nv)
    _set_target(logits_nv, target_n, owned_n, torch.zeros_like(max_n))


def _set_target(matrix_nv: torch.Tensor, target_n: torch.Tensor, owned_n: torch.Tensor, value_n: torch.Tensor) -> None:
    """Write value_n at every owned row's target column; without a host decision, so the device never waits."""
    column = target_n[:, None]
    kept_n = matrix_nv.gather(-1, column).squeeze(-1)
    matrix_nv.scatter_(-1, column, torch.where(owned_n, value_n.to(matrix_nv.dtype), kept_n)[:, None])
