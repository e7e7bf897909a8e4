"""A model without a transformer, for a rehearsal of the schedule before the first iteration.

A pipeline compiles and loads kernels, creates communicators and connects pairs of ranks when it first uses them.
Without a rehearsal, this work happens in the middle of the first schedule, while all other ranks wait. A rehearsal runs
an iteration of a few full-size microbatches, with `RehearsalModel` in place of the user's model. Messages, collectives,
vocabulary passes and their buffers are real. The transformer's passes are left out, activations are zero, and only
zeros are added to a weight's `main_grad`.
"""

from __future__ import annotations

from itertools import chain, cycle, islice

import torch

from megatron_vp.runtime.model import Shapes
from megatron_vp.schedule.placement import Placement

MICROBATCHES = 3
"""The tokens of the first microbatch are spread evenly over the vocabulary shards. Most tokens of the second microbatch
belong to the first shard, and most tokens of the third belong to the last shard.
"""


class RehearsalModel:
    """Implements `megatron_vp.runtime.model.Model` for one rank.

    Args:
        first_tokens: the first token id of every vocabulary shard that is not empty; [0] if the vocabulary is not
            sharded.
        gradients: False for evaluation.
    """

    def __init__(
        self,
        shapes: Shapes,
        placement: Placement,
        rank: int,
        first_tokens: list[int],
        sharded: bool,
        gradients: bool,
    ) -> None:
        self._shapes = shapes
        self._stages = placement.stage_of[rank]
        self._last = placement.stages - 1
        self._first_tokens = first_tokens
        self._sharded = sharded
        self._gradients = gradients
        self._words_ahead: torch.Tensor | None = None

    def load(self, chunk: int, microbatch: int) -> None:
        """Do nothing: there is no data to read."""

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Return ids that make each rank exchange many rows in one microbatch and few rows in another.

        Exchanges of many rows and of few rows use different kernels, and a rehearsal must load all of these kernels.
        """
        ids_be = self._shapes.token_ids()
        often = self._first_tokens if microbatch == 0 else [self._first_tokens[0 if microbatch == 1 else -1]]
        ids = islice(chain(self._first_tokens, cycle(often)), ids_be.numel())
        return ids_be.copy_(torch.tensor(list(ids)).view_as(ids_be))

    labels = tokens

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """Return zeros in place of an activation."""
        return (words_bsh.transpose(0, 1).chunk(self._shapes.sp_size)[self._shapes.sp_rank] * 0).contiguous()

    def receive_words(self, words_rh: torch.Tensor) -> None:
        """Keep the embedding rows for the next `forward`, so that the backward also computes their gradient."""
        self._words_ahead = words_rh

    def forward(
        self, chunk: int, microbatch: int, input_sbh: torch.Tensor | None, labels_bs: torch.Tensor | None
    ) -> torch.Tensor:
        """Return zeros in the shape of the chunk's output, linked to the input by autograd."""
        with torch.set_grad_enabled(self._gradients):
            if input_sbh is None:
                input_sbh = self._shapes.activation(0).zero_().requires_grad_(self._gradients)
            output_sbh = input_sbh * 0
            if self._words_ahead is not None:
                output_sbh = output_sbh + self._words_ahead.sum() * 0
                self._words_ahead = None
            stage = self._stages[chunk]
            if stage == self._last and not self._sharded:
                return self._shapes.token_values().zero_() + output_sbh.sum()
            more = self._shapes.states(stage + 1) // self._shapes.states(stage)
            return output_sbh.repeat(more, 1, 1) if more > 1 else output_sbh

    def release_output(self, output_sbh: torch.Tensor) -> None:
        """Do nothing: the output is not worth freeing."""

    def backward(self, chunk: int, microbatch: int, output: torch.Tensor, gradient: torch.Tensor) -> None:
        """Compute the gradients of the inputs; all gradients are zero."""
        output.backward(gradient)

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Do nothing: there are no weights."""

    def loss(
        self, microbatch: int, token_loss_bs: torch.Tensor, target_is_argmax_bs: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a gradient of zero for every token."""
        return torch.zeros_like(token_loss_bs) if self._gradients else None

    def gradient_complete(self, parameter: torch.nn.Parameter) -> None:
        """Do nothing, so that Megatron does not start to synchronise gradients."""
