"""Represents D, the derivative of the loss with respect to a shard's logits, without forming the matrix.

    D_ij = c_i E_ij + e_i onehot_ij      c_i = s_i exp(a_i - A_i) / L_i      e_i = s_i exp(z_i - A_i) / L_i - t

Here z is the target's logit, and a, A and L are defined in `megatron_vp.vocab.statistics`. s = 1 + 2 zeta LSE, where
LSE is the log-sum-exp and zeta the weight of the z-loss (0 without a z-loss). t is the target's weight, which is 1
without label smoothing (`megatron_vp.vocab.loss`). Pass S computes E = exp(logit - a) and sets the target's entry to
zero. The target's entry of D is e alone, computed from z in fp32. E is stored in the model's dtype, so c E - 1 would be
mostly rounding error if the model is confident.

A softcap k turns a logit y into k tanh(y / k). Then a and z are capped logits, the entries of E are multiplied by the
slope 1 - tanh(y / k)^2, and e is multiplied by the slope at the target, 1 - (z / k)^2.

Label smoothing subtracts the same number u from every entry of D. This constant term has rank one, so the GEMMs that
read E can include it: E and X' = c g X get `SMOOTHING_ROWS` additional rows. All entries of E's additional rows are
`SMOOTHING_ENTRY`.

    E W        each added row of the product is SMOOTHING_ENTRY times the sum of W's rows; dX / g is reduced by u times
               this sum
    E^T X'     the first added row of X' is -u / SMOOTHING_ENTRY times sum_i g_i x_i, rounded. The second is the
               rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_vp.vocab.loss import TokenLoss
from megatron_vp.vocab.statistics import GlobalStatistics

SMOOTHING_ROWS = 2
"""Number of rows that label smoothing adds to E and X': one for the smoothing term, and one for its rounding error."""

SMOOTHING_ENTRY = 2.0**-8
"""The value of every entry in the additional rows of E. It keeps the additional rows of X' and of E W within the range
of fp16.
"""


@dataclass(frozen=True)
class Derivative:
    """The quantities from which c and e are computed. Vectors are [n], in fp32 (fp64 in an fp64 model).

    largest_n: a, the shard's largest logit for each token.
    target_n: int64, the target's column, -1 if the target belongs to another shard.
    target_logit_n: z, zero if the target belongs to another shard.
    total: A and L of the whole vocabulary.
    vocab_size: padded size of the whole vocabulary.
    softcap: k; 0 without a softcap.
    """

    largest_n: torch.Tensor
    target_n: torch.Tensor
    target_logit_n: torch.Tensor
    total: GlobalStatistics
    loss: TokenLoss
    vocab_size: int
    softcap: float = 0.0

    @property
    def target_weight(self) -> float:
        """t, the weight of the target's logit in the loss."""
        return self.loss.target_weight(self.vocab_size)

    @property
    def smoothing_factor(self) -> float:
        """u / SMOOTHING_ENTRY, where u is the number that label smoothing subtracts from D."""
        return self.loss.logit_weight(self.vocab_size) / SMOOTHING_ENTRY

    @property
    def scale_n(self) -> torch.Tensor:
        """c, the scale of each row of E."""
        return self.total.probability(self.largest_n) * self.loss.softmax_weight(self.total.log_sum_exp_n)

    @property
    def entry_n(self) -> torch.Tensor:
        """e, the target's entry in each row of D; zero if the target belongs to another shard."""
        softmax_part_n = self.total.probability(self.target_logit_n)
        entry_n = softmax_part_n * self.loss.softmax_weight(self.total.log_sum_exp_n) - self.target_weight
        if self.softcap:
            entry_n = entry_n * (1 - (self.target_logit_n / self.softcap).square())
        return torch.where(self.target_n >= 0, entry_n, 0)


def smallest_scale(dtype: torch.dtype) -> float:
    """Smallest scale c that can be applied to X instead of E. E then stores the target's entry e of D as e / c, which
    must be in the range of E's dtype. X becomes c g X, which must be in the range of X's dtype. In fp16, the loss scale
    in g leaves no range for c, so c is always applied to E in rows with a target.
    """
    return float("inf") if dtype == torch.float16 else 2.0**-60
