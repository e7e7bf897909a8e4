"""The interface that the runtime needs from a model. `megatron_vp.mcore` implements it with Megatron's modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Shapes:
    """Sizes of one microbatch: s tokens a sequence, b sequences, h hidden; n = s * b tokens in s-major order.

    mtp_depth: tokens that multi-token prediction predicts beyond the next one. The last stage puts out a state for each
        prediction, all tokens' first predictions before their second ones.
    cp_chunks: with context parallelism, the chunks of a longer sequence, equally long, that the s positions are.
    sp_size, sp_rank: ranks that cut the activations between chunks along s (sequence parallelism), and this rank's
        place among them. The last stage's whole output is ordered by these ranks first, then by prediction.
    """

    sequence: int
    batch: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    mtp_depth: int = field(default=0, kw_only=True)
    cp_chunks: int = field(default=1, kw_only=True)
    sp_size: int = field(default=1, kw_only=True)
    sp_rank: int = field(default=0, kw_only=True)

    @property
    def tokens(self) -> int:
        """n."""
        return self.sequence * self.batch

    @property
    def predictions(self) -> int:
        """Tokens predicted at each position: the next one and `mtp_depth` beyond it."""
        return 1 + self.mtp_depth

    @property
    def outputs(self) -> int:
        """Rows of the last stage's output: n for each prediction."""
        return self.predictions * self.tokens

    @property
    def own_outputs(self) -> slice:
        """The rows of the last stage's output that this rank holds if it is on that stage."""
        size = self.outputs // self.sp_size
        return slice(self.sp_rank * size, (self.sp_rank + 1) * size)

    def by_output(self, values_psb: torch.Tensor) -> torch.Tensor:
        """Values [predictions, s, b] in the order of the last stage's output, [outputs]."""
        by_part = values_psb.view(self.predictions, self.sp_size, -1, self.batch)
        return by_part.transpose(0, 1).flatten()

    def by_prediction(self, values_n: torch.Tensor) -> torch.Tensor:
        """Values in the order of the last stage's output, [outputs], as [predictions, s, b]."""
        by_part = values_n.view(self.sp_size, self.predictions, -1, self.batch)
        return by_part.transpose(0, 1).reshape(self.predictions, self.sequence, self.batch)

    def predictions_of(self, values_n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each prediction a view [sp_size, s / sp_size, b] of values in the order of the last stage's output."""
        return values_n.view(self.sp_size, self.predictions, -1, self.batch).unbind(1)

    def ahead(self, values_be: torch.Tensor, depth: int) -> torch.Tensor:
        """The values `depth` positions further, [b, s, ...], of values laid out as `token_ids`, [b, e, ...]."""
        if not depth:
            return values_be[:, : self.sequence]
        own, following = (
            each.unflatten(1, (self.cp_chunks, -1)) for each in values_be.tensor_split([self.sequence], dim=1)
        )
        skipped = max(0, depth - own.shape[2])  # of those that follow, where `depth` exceeds a whole chunk
        return torch.cat([own[:, :, depth:], following[:, :, skipped:depth]], dim=2).flatten(1, 2)

    def activation(self) -> torch.Tensor:
        """An empty activation [s / sp_size, b, h] in the model's dtype."""
        sequence = self.sequence // self.sp_size
        return torch.empty(sequence, self.batch, self.hidden, dtype=self.dtype, device=self.device)

    def rows(self, count: int) -> torch.Tensor:
        """`count` empty rows [count, h] in the model's dtype."""
        return torch.empty(count, self.hidden, dtype=self.dtype, device=self.device)

    def token_loss_grads(self) -> torch.Tensor:
        """An empty g: fp32 [outputs]."""
        return torch.empty(self.outputs, dtype=torch.float32, device=self.device)

    def token_ids(self) -> torch.Tensor:
        """An empty int64 [b, e], e = s + cp_chunks * mtp_depth: ids of the s positions, then of those that follow.

        For each chunk in turn the `mtp_depth` positions behind it follow; beyond a sequence's end they hold token 0,
        as in Megatron.
        """
        following = self.cp_chunks * self.mtp_depth
        return torch.empty(self.batch, self.sequence + following, dtype=torch.int64, device=self.device)

    def token_values(self) -> torch.Tensor:
        """An empty fp32 [b, s]: losses or gradients by token."""
        return torch.empty(self.batch, self.sequence, dtype=torch.float32, device=self.device)


class Model(Protocol):
    """The transformer part of one rank, and the user's data and loss function."""

    def load(self, chunk: int, microbatch: int) -> None:
        """Read the data that a chunk with a whole vocabulary layer uses; asked on the first and last pipeline rank."""

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Token ids of a microbatch as `Shapes.token_ids`, [b, e]; asked on the first pipeline rank only."""

    def labels(self, microbatch: int) -> torch.Tensor:
        """Labels of a microbatch as `Shapes.token_ids`, [b, e]; asked on the last pipeline rank only."""

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """Everything between the word embedding and the first layer: [b, s, h] to [s / sp_size, b, h].

        Virtual stage 0 only.
        """

    def receive_words(self, words_rh: torch.Tensor) -> None:
        """The embedding rows that multi-token prediction uses in the next `forward` of the last virtual stage.

        [b e, h], in the order of `Shapes.token_ids`. Asked only where `Shapes.mtp_depth` is above 0.
        """

    def forward(
        self, chunk: int, microbatch: int, input_sbh: torch.Tensor | None, labels_bs: torch.Tensor | None
    ) -> torch.Tensor:
        """Forward of one chunk; the output may be emptied by `release_output`.

        A chunk with the whole embedding has no input, one with the whole output layer returns token losses, fp32
        [b, s]; `labels_bs` are given where another rank reads them.
        """

    def release_output(self, output_sbh: torch.Tensor) -> None:
        """The output's data is not needed for the backward any more."""

    def backward(self, chunk: int, microbatch: int, output: torch.Tensor, gradient: torch.Tensor) -> None:
        """Backward from a chunk's output; gradients end in the leaves and in the parameters' `main_grad`.

        In a schedule with W passes the weights' part is left to `weight_gradient`.
        """

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """The weight-gradient work that the backward of the chunk and microbatch left over."""

    def loss(
        self, microbatch: int, token_loss_bs: torch.Tensor, target_is_argmax_bs: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the user's loss function on token losses fp32 [b, s]; returns g fp32 [b, s], None without gradients.

        `target_is_argmax_bs` says which targets have the largest logit; None if the vocabulary layers are whole.
        With multi-token prediction all three are [predictions b, s].
        Asked on the last pipeline rank only, in microbatch order.
        """

    def gradient_complete(self, parameter: torch.nn.Parameter) -> None:
        """A vocabulary weight has received its last contribution of this iteration."""
