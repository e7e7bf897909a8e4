"""Buffers for a rank without peers, filled with numbers in place of the data that peers would send.

The buffers are used for timing, so the numbers are finite and of ordinary magnitude. NaN and denormal numbers are slow
on a CPU, and on a GPU the values affect the power draw and thus the clock rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_vp.runtime.model import Shapes


@dataclass(frozen=True)
class RandomBuffers(Shapes):
    """`Shapes` whose buffers are filled with normally distributed numbers, or with token ids below `vocab_size`."""

    vocab_size: int

    def activation(self, stage: int) -> torch.Tensor:
        """The input of a stage, or its gradient; see `Shapes.activation`."""
        return super().activation(stage).normal_()

    def rows(self, count: int) -> torch.Tensor:
        """Rows [count, h]."""
        return super().rows(count).normal_()

    def token_ids(self) -> torch.Tensor:
        """Token ids or labels, int64 [b, e]; see `Shapes.token_ids`."""
        return super().token_ids().random_(self.vocab_size)

    def token_loss_grads(self) -> torch.Tensor:
        """The gradient of the microbatch's mean token loss with respect to each token loss, fp32 [outputs]."""
        return super().token_loss_grads().fill_(1 / self.tokens)

    def token_values(self) -> torch.Tensor:
        """Per-token losses or gradients, fp32 [b, s]."""
        return super().token_values().fill_(1 / self.tokens)
