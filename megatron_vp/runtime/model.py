"""What the runtime asks of the model it drives. `megatron_vp.mcore` implements it with Megatron's modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Shapes:
    """Sizes of one microbatch: s tokens a sequence, b sequences, h hidden; n = s * b tokens in s-major order.

    heads: the last stage puts out this many states a token, head after head: one for the next token, and one for each
        further token that multi-token prediction looks ahead.
    stretches: consecutive pieces, equally long, that the s positions are cut from a longer sequence in.
    parts, part: sequence parallelism cuts the activations between chunks along s, in how many parts; which is this
        rank's. The last stage's whole output is part after part, each with all heads.
    """

    sequence: int
    batch: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    heads: int = field(default=1, kw_only=True)
    stretches: int = field(default=1, kw_only=True)
    parts: int = field(default=1, kw_only=True)
    part: int = field(default=0, kw_only=True)

    @property
    def tokens(self) -> int:
        """n."""
        return self.sequence * self.batch

    @property
    def outputs(self) -> int:
        """Rows of the last stage's output: n for each head."""
        return self.heads * self.tokens

    @property
    def own_outputs(self) -> slice:
        """The rows of the last stage's output that this rank holds where it is on that stage."""
        size = self.outputs // self.parts
        return slice(self.part * size, (self.part + 1) * size)

    def by_output(self, values_hsb: torch.Tensor) -> torch.Tensor:
        """Values of tokens [heads, s, b] in the order of the last stage's output, [heads n]."""
        cut = values_hsb.view(self.heads, self.parts, -1, self.batch)
        return cut.transpose(0, 1).flatten()

    def by_head(self, values_n: torch.Tensor) -> torch.Tensor:
        """Values in the order of the last stage's output, [heads n], as [heads, s, b]."""
        cut = values_n.view(self.parts, self.heads, -1, self.batch)
        return cut.transpose(0, 1).reshape(self.heads, self.sequence, self.batch)

    def ahead(self, values_be: torch.Tensor, head: int) -> torch.Tensor:
        """What stands `head` positions further, [b, s, ...], of values laid out as `token_ids`, [b, e, ...]."""
        own, following = (
            part.unflatten(1, (self.stretches, -1)) for part in values_be.tensor_split([self.sequence], dim=1)
        )
        passed = max(0, head - own.shape[2])  # of those that follow, by a head that looks beyond a whole stretch
        return torch.cat([own[:, :, head:], following[:, :, passed:head]], dim=2).flatten(1, 2)

    def activation(self) -> torch.Tensor:
        """An empty activation [s / parts, b, h] in the model's dtype."""
        sequence = self.sequence // self.parts
        return torch.empty(sequence, self.batch, self.hidden, dtype=self.dtype, device=self.device)

    def rows(self, count: int) -> torch.Tensor:
        """`count` empty rows [count, h] in the model's dtype."""
        return torch.empty(count, self.hidden, dtype=self.dtype, device=self.device)

    def row_factors(self) -> torch.Tensor:
        """An empty fp32 [heads n]."""
        return torch.empty(self.outputs, dtype=torch.float32, device=self.device)

    def token_ids(self) -> torch.Tensor:
        """An empty int64 [b, e], e = s + stretches * (heads - 1): ids of the s positions, then of those that follow.

        Behind each stretch in turn `heads - 1` positions follow; beyond a sequence's end they hold token 0, as in
        Megatron.
        """
        following = self.stretches * (self.heads - 1)
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
        """Everything between the word embedding and the first layer: [b, s, h] to [s / parts, b, h].

        Virtual stage 0 only.
        """

    def receive_words(self, words_rh: torch.Tensor) -> None:
        """The words that the heads beyond the first look up in the next `forward` of the last virtual stage.

        [b e, h], in the order of `Shapes.token_ids`. Asked only where `Shapes.heads` is above 1.
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
        """What the backward of the chunk and microbatch left to do."""

    def loss(
        self, microbatch: int, token_loss_bs: torch.Tensor, likeliest_bs: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the user's loss function on token losses fp32 [b, s]; returns g fp32 [b, s], None without gradients.

        `likeliest_bs` says which targets are the likeliest tokens; None where the vocabulary layers are whole. With
        several heads all three are [heads b, s].
        Asked on the last pipeline rank only, in microbatch order.
        """

    def gradient_complete(self, parameter: torch.nn.Parameter) -> None:
        """A vocabulary weight has received its last contribution of this iteration."""
