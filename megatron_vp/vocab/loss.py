"""The mathematics between S and T: the loss of a token, the softmax statistics that it needs, and its derivative.

**Loss.** Cross entropy, with label smoothing and a z-loss if the user asks for them:

    loss_i = LSE_i - t Y_i,y - u sum_j Y_ij + zeta LSE_i^2      u = alpha / (V - 1), t = 1 - V u

LSE is the log-sum-exp of the logits Y, and y is the target. Label smoothing moves probability alpha from the target to
the other V - 1 tokens in equal parts, as Megatron's `vocab_parallel_cross_entropy` does. The z-loss keeps the softmax's
normaliser near one (PaLM, arXiv 2204.02311, section 5).

**Statistics.** The data of barrier C1 (arXiv 2411.05288, section 4). A shard contributes three floats per token: the
largest logit a, the sum l of exp(logit - a), and its part of the term that the loss subtracts from the log-sum-exp.
Without label smoothing, this term is the target's logit, and shards that do not own the target contribute zero. The
floats are sent as one packed [3, n] tensor, and every rank folds the statistics of the shards in the same order, so all
ranks get the same bits. With tensor parallelism, the tensor ranks of each stage first fold their shards' statistics.
Then every rank folds the results of all stages. A and L are the largest logit and the sum over the whole vocabulary.

**Derivative.** D is the derivative of the loss with respect to a shard's logits. It is never formed:

    D_ij = c_i E_ij + e_i onehot_ij - u      c_i = s_i exp(a_i - A_i) / L_i      e_i = s_i exp(z_i - A_i) / L_i - t

Here z is the target's logit, and s = 1 + 2 zeta LSE. Pass S computes E = exp(logit - a) and sets the target's entry to
zero. The target's entry is e alone, computed from z in fp32. E is stored in the model's dtype, so c E - 1 would be
mostly rounding error if the model is confident. A softcap k turns a logit y into k tanh(y / k). Then a and z are capped
logits, the entries of E are multiplied by the slope 1 - tanh(y / k)^2, and e is multiplied by the slope at the target,
1 - (z / k)^2.

**Log-probabilities and entropies.** The log-probability of a token is its negative cross entropy. A temperature divides
all logits first. The entropy needs a fourth statistic, w = sum_j e_j u_j with u = logit - a and e = exp(u):

    H = log L - W / L      W = sum over shards of exp(a - A) (w + (a - A) l)

Both terms of H have the same sign, so nothing cancels. If g is the gradient with respect to the cross entropy, and h
the gradient with respect to H, the derivative with respect to a logit is p_j (g + h (M - y_j)) - g onehot_j. Here p is
the softmax, M = A + W / L is the mean logit, and the logit y_j = a + log E_j is recovered from E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """The parameters of the loss, which by default is the cross entropy.

    label_smoothing: alpha in [0, 1).
    z_loss: zeta >= 0, the weight of the squared log-sum-exp.
    temperature: divides all logits; 1 with label smoothing.
    entropy: whether the entropy of the softmax is computed, too; False with label smoothing.
    entropy_gradient: whether the training loss may depend on the entropy; only with `entropy` and vocab-1.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0
    entropy: bool = False
    entropy_gradient: bool = False

    @property
    def statistics(self) -> int:
        """Number of statistics per token and shard."""
        return 3 + self.entropy

    def logit_weight(self, vocab_size: int) -> float:
        """u, the weight of every logit in the loss; `vocab_size` is V, the padded vocabulary size."""
        return self.label_smoothing / (vocab_size - 1) if self.label_smoothing else 0.0

    def target_weight(self, vocab_size: int) -> float:
        """t, the weight of the target's logit in addition to u."""
        return 1.0 - vocab_size * self.logit_weight(vocab_size)

    def softmax_weight(self, log_sum_exp_n: torch.Tensor) -> torch.Tensor:
        """1 + 2 zeta LSE, the derivative of the loss with respect to the log-sum-exp, [n]."""
        return 1.0 + 2.0 * self.z_loss * log_sum_exp_n

    def penalty(self, log_sum_exp_n: torch.Tensor) -> torch.Tensor:
        """zeta LSE^2, [n]."""
        return self.z_loss * log_sum_exp_n.square()


CROSS_ENTROPY = TokenLoss()

MAX, SUM, LINEAR, TILT = 0, 1, 2, 3
"""Rows of a packed statistics tensor; the last exists only if the entropy is computed."""

LOWEST = -800.0
"""Exponent whose exponential is zero in fp32 and fp64. It replaces -inf, whose product with zero would be NaN."""


@dataclass(frozen=True)
class GlobalStatistics:
    """Softmax statistics over the vocabulary: vectors [n] in `statistics_dtype`, filled by `fold_`."""

    max_n: torch.Tensor
    """A, the largest logit."""
    sum_n: torch.Tensor
    """L, the sum of exp(logit - A)."""
    linear_n: torch.Tensor
    """The part of the loss that is linear in the logits: the target's logit (zero if no shard owns the target) or, with
    label smoothing, a weighted sum of all logits.
    """
    tilt_n: torch.Tensor | None = None
    """W, the sum of exp(logit - A) (logit - A); None unless the entropy is computed."""

    @property
    def mean_n(self) -> torch.Tensor:
        """W / L, the mean of logit - A under the softmax."""
        assert self.tilt_n is not None
        return self.tilt_n / self.sum_n

    @property
    def entropy_n(self) -> torch.Tensor:
        """Entropy of every token's softmax, [n]."""
        return self.sum_n.log() - self.mean_n

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


@dataclass(frozen=True)
class Derivative:
    """The quantities from which c and e are computed. Vectors are [n], in fp32 (fp64 in an fp64 model).

    largest_n: a, the shard's largest logit for each token.
    target_n: int64, the target's column, -1 if the target belongs to another shard.
    target_logit_n: z, zero if the target belongs to another shard.
    total: A and L of the whole vocabulary.
    vocab_size: padded size of the whole vocabulary.
    softcap: k, divided by the temperature as the logits are; 0 without a softcap.
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
