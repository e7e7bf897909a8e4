"""Softmax statistics: the data of barrier C1, and the results that every rank computes from it (arXiv 2411.05288,
section 4).

A shard contributes three floats per token: the largest logit a, the sum l of exp(logit - a), and its part of the term
that the loss subtracts from the log-sum-exp. Without label smoothing, this term is the target's logit, and shards that
do not own the target contribute zero. The three floats are sent as one packed [3, n] tensor, and every rank folds the
statistics of the shards in the same order, so all ranks get the same bits. With tensor parallelism, the tensor ranks of
each stage first fold their shards' statistics. Then every rank folds the results of all stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_vp.vocab.loss import TokenLoss

MAX, SUM, LINEAR = 0, 1, 2
"""Rows of a packed statistics tensor."""


@dataclass(frozen=True)
class GlobalStatistics:
    """Softmax statistics over the vocabulary: three vectors [n] in `statistics_dtype`, filled by `Operations.fold_`."""

    max_n: torch.Tensor
    """A, the largest logit."""
    sum_n: torch.Tensor
    """L, the sum of exp(logit - A)."""
    linear_n: torch.Tensor
    """The part of the loss that is linear in the logits: the target's logit (zero if no shard owns the target) or, with
    label smoothing, a weighted sum of all logits.
    """

    @property
    def log_sum_exp_n(self) -> torch.Tensor:
        """A + log L."""
        return self.max_n + self.sum_n.log()

    def token_loss(self, loss: TokenLoss) -> torch.Tensor:
        """Loss of every token, [n]."""
        token_loss_n = self.sum_n.log() - (self.linear_n - self.max_n)
        return token_loss_n + loss.penalty(self.log_sum_exp_n) if loss.z_loss else token_loss_n

    @property
    def target_is_argmax_n(self) -> torch.Tensor:
        """Whether the target's logit is the largest, bool [n]; meaningless with label smoothing."""
        return self.linear_n == self.max_n

    def probability(self, logit_n: torch.Tensor) -> torch.Tensor:
        """Return the softmax probability of one logit per token.

        The probability is not computed as exp(logit - LSE): a log-sum-exp of 10 has a rounding error of 5e-7, which
        would affect the whole row of the softmax.
        """
        return torch.exp(logit_n - self.max_n) / self.sum_n


def statistics_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of statistics and loss: fp32, or fp64 if the model is fp64."""
    return torch.promote_types(model_dtype, torch.float32)
