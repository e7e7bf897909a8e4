"""Vocabulary layers that are whole: Megatron's own, inside the first and the last stage's chunk."""

from __future__ import annotations

import torch

from megatron_vp.runtime.chunk_passes import Handler
from megatron_vp.runtime.model import Model
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.schedule.passes import PassKind
from megatron_vp.schedule.placement import Placement


class WholeVocabLayers:
    """Token losses leave the last stage, and the loss function's gradient by token comes back.

    Where rank p-1, which reads the labels and runs the loss function, does not hold the last stage, the store is filled
    and emptied by messages; else by the passes themselves.
    """

    def __init__(self, store: Store, model: Model, placement: Placement, rank: int) -> None:
        self._store = store
        self._model = model
        self._last = placement.stages - 1
        self._reads_tokens = rank == 0
        self._reads_labels = rank == placement.ranks - 1
        self._last_chunk = placement.chunks - 1
        self._labels_travel = placement.last_rank != placement.ranks - 1

    @property
    def handlers(self) -> dict[PassKind, Handler]:
        """No handlers: the chunks do everything."""
        return {}

    def load(self, microbatch: int) -> None:
        """The chunks that hold the layers use the data; labels for another rank's chunk leave by message."""
        if self._reads_tokens:
            self._model.load(0, microbatch)
        if self._reads_labels:
            self._model.load(self._last_chunk, microbatch)
            if self._labels_travel:
                self._store.put(Slot.LABELS, microbatch, self._model.labels(microbatch), at=self._last)

    def first_input(self, microbatch: int) -> tuple[None, None]:
        """The chunk embeds its tokens itself."""
        return None, None

    def first_gradient(self, microbatch: int, leaf: torch.Tensor | None) -> None:
        """Nothing to hand on: the gradient ended in the embedding's weight."""

    def prepare_last(self, microbatch: int) -> torch.Tensor | None:
        """The tensor from rank p-1, or None on rank p-1 itself."""
        return self._store.take(Slot.LABELS, microbatch, at=self._last) if self._labels_travel else None

    def last_output(self, microbatch: int, output: torch.Tensor) -> None:
        """Token losses, fp32 [b, s]."""
        self._store.put(Slot.TOKEN_LOSS, microbatch, output, at=self._last)

    def last_gradient(self, microbatch: int) -> torch.Tensor:
        """g, fp32 [b, s]."""
        return self._store.take(Slot.TOKEN_GRADIENT, microbatch, at=self._last)

    def finish_last(self, microbatch: int) -> None:
        """Nothing is left."""

    def loss(self, microbatch: int) -> None:
        """The user's loss function."""
        token_loss_bs = self._store.take(Slot.TOKEN_LOSS, microbatch, at=self._last)
        gradient_bs = self._model.loss(microbatch, token_loss_bs, None)
        if gradient_bs is not None:
            self._store.put(Slot.TOKEN_GRADIENT, microbatch, gradient_bs.contiguous(), at=self._last)
