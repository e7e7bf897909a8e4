"""The loss of a token: cross entropy, with label smoothing and a z-loss if the user asks for them.

    loss_i = LSE_i - t Y_i,y - u sum_j Y_ij + zeta LSE_i^2      u = alpha / (V - 1), t = 1 - V u
    D_ij = (1 + 2 zeta LSE_i) softmax_ij - t onehot_ij - u

LSE is the log-sum-exp of the logits Y, and y is the target. Label smoothing moves probability alpha from the target to
the other V - 1 tokens in equal parts, as Megatron's `vocab_parallel_cross_entropy` does. The z-loss keeps the softmax's
normaliser near one (PaLM, arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """The parameters of the loss, which by default is the cross entropy.

    label_smoothing: alpha in [0, 1).
    z_loss: zeta >= 0, the weight of the squared log-sum-exp.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

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
