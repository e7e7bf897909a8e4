"""Unsharded vocabulary layers, which are Megatron's own and belong to the chunks of the first and the last stage."""

from __future__ import annotations

import torch

from megatron_vp.runtime.iteration import Handler, Iteration
from megatron_vp.runtime.store import Slot
from megatron_vp.schedule.passes import PassKind


class WholeVocabLayers:
    """Moves token losses from the last stage to the loss function, and their gradients back.

    Rank p-1 reads the labels and runs the loss function. If rank p-1 does not hold the last stage, messages carry
    labels, losses and gradients between rank p-1 and the rank of the last stage.
    """

    def __init__(self, iteration: Iteration) -> None:
        placement, rank = iteration.placement, iteration.rank
        self._store = iteration.store
        self._model = iteration.model
        self._last = placement.stages - 1
        self._reads_tokens = rank == 0
        self._reads_labels = rank == placement.ranks - 1
        self._last_chunk = placement.chunks - 1
        self._labels_travel = placement.last_rank != placement.ranks - 1

    @property
    def handlers(self) -> dict[PassKind, Handler]:
        """There are no handlers, because F, B and W of the chunks include the vocabulary layers."""
        return {}

    def load(self, microbatch: int) -> None:
        """Read token ids on rank 0 and labels on rank p-1. Store the labels if another rank holds the last stage."""
        if self._reads_tokens:
            self._model.load(0, microbatch)
        if self._reads_labels:
            self._model.load(self._last_chunk, microbatch)
            if self._labels_travel:
                self._store.put(Slot.LABELS, microbatch, self._model.labels(microbatch), at=self._last)

    def first_input(self, microbatch: int) -> tuple[None, None]:
        """Return no autograd leaf and no input, because the chunk embeds its tokens itself."""
        return None, None

    def first_gradient(self, microbatch: int, leaf: torch.Tensor | None) -> None:
        """Do nothing: the backward has already accumulated the gradient of the embedding's weight."""

    def prepare(self, microbatch: int, stage: int) -> torch.Tensor | None:
        """Return the labels that rank p-1 sent to the last stage; None if there are none."""
        travelled = stage == self._last and self._labels_travel
        return self._store.take(Slot.LABELS, microbatch, at=self._last) if travelled else None

    def last_output(self, microbatch: int, output: torch.Tensor) -> None:
        """Store the token losses, fp32 [b, s]."""
        self._store.put(Slot.TOKEN_LOSS, microbatch, output, at=self._last)

    def last_gradient(self, microbatch: int) -> torch.Tensor:
        """Return g, the gradient with respect to the token losses, fp32 [b, s]."""
        return self._store.take(Slot.TOKEN_GRADIENT, microbatch, at=self._last)

    def finish(self, microbatch: int, stage: int) -> None:
        """Do nothing: no work remains."""

    def loss(self, microbatch: int) -> None:
        """Run the user's loss function."""
        token_loss_bs = self._store.take(Slot.TOKEN_LOSS, microbatch, at=self._last)
        gradient_bs = self._model.loss(microbatch, token_loss_bs, None)
        if gradient_bs is not None:
            self._store.put(Slot.TOKEN_GRADIENT, microbatch, gradient_bs.contiguous(), at=self._last)
