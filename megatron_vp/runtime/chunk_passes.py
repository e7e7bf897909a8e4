"""F, B and W of the rank's chunks in one iteration, and the interface they need from the vocabulary layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch

from megatron_vp.runtime.model import Model
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.schedule.passes import PassKind
from megatron_vp.schedule.placement import Placement

Handler = Callable[[int, int], None]
"""Runs a pass of a microbatch and a chunk."""


class VocabLayers(Protocol):
    """Interface of the vocabulary layers: the input of virtual stage 0, and the use of the last stage's output."""

    @property
    def handlers(self) -> dict[PassKind, Handler]:
        """Handlers of the passes that the layers add to F, B and W."""

    def load(self, microbatch: int) -> None:
        """Read the microbatch's data on the ranks that have some: token ids on rank 0, labels on rank p-1."""

    def first_input(self, microbatch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """For stage 0: the leaf of autograd's graph that gets a gradient, and the chunk's input [s, b, h]."""

    def first_gradient(self, microbatch: int, leaf: torch.Tensor | None) -> None:
        """The backward of stage 0 is done and has left its gradient in the leaf."""

    def prepare_last(self, microbatch: int) -> torch.Tensor | None:
        """The last stage's forward is next; returns labels, int64 [b, s], that it needs and its rank does not read."""

    def last_output(self, microbatch: int, output: torch.Tensor) -> None:
        """The last stage's output, cut off from the graph."""

    def last_gradient(self, microbatch: int) -> torch.Tensor:
        """The gradient of the last stage's output."""

    def finish_last(self, microbatch: int) -> None:
        """The backward of the last stage is done."""

    def loss(self, microbatch: int) -> None:
        """The user's loss function, on rank p-1."""


class ChunkPasses:
    """F, B and W.

    Args:
        rank: this pipeline rank.
        placement: which virtual stage each chunk of each rank is.
        gradients: False in evaluation.
        split_backward: B is the input gradient alone and a W follows.
        offload: takes what the forwards of some chunks save; None if all of it stays on the device.
    """

    def __init__(
        self,
        store: Store,
        model: Model,
        vocab_layers: VocabLayers,
        rank: int,
        placement: Placement,
        gradients: bool,
        split_backward: bool,
        offload: Offload | None = None,
    ) -> None:
        self._store = store
        self._model = model
        self._vocab_layers = vocab_layers
        self._stages = placement.stage_of[rank]
        self._last = placement.stages - 1
        self._gradients = gradients
        self._split_backward = split_backward
        self._offload = offload

    @property
    def handlers(self) -> dict[PassKind, Handler]:
        """Created on demand: if kept here, they would form a reference cycle that delays freeing the iteration."""
        return {
            PassKind.F: self._forward,
            PassKind.B: self._backward,
            PassKind.W: self._weight_gradient,
            PassKind.BW: self._whole_backward,
        }

    def _forward(self, microbatch: int, chunk: int) -> None:
        stage = self._stages[chunk]
        with self._offload.saving(microbatch, chunk) if self._offload else nullcontext() as saved:
            leaf, output = self._graph(microbatch, chunk, stage)
        result = output.detach()
        if self._gradients:
            self._model.release_output(output)
            self._store.put(Slot.CHUNK_GRAPH, microbatch, (leaf, output), at=chunk)
        if saved is not None and self._offload is not None:
            self._offload.close(saved, chunk, leaf)
        if stage == self._last:
            self._vocab_layers.last_output(microbatch, result)
        else:
            self._store.put(Slot.ACTIVATION, microbatch, result, at=stage + 1)

    def _graph(self, microbatch: int, chunk: int, stage: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The chunk's input, if it has one, and its output."""
        if stage == 0:
            leaf, chunk_input = self._vocab_layers.first_input(microbatch)
        else:
            leaf = self._store.take(Slot.ACTIVATION, microbatch, at=stage).detach().requires_grad_(self._gradients)
            chunk_input = leaf
        labels = self._vocab_layers.prepare_last(microbatch) if stage == self._last else None
        return leaf, self._model.forward(chunk, microbatch, chunk_input, labels)

    def _backward(self, microbatch: int, chunk: int) -> None:
        stage = self._stages[chunk]
        if stage == self._last:
            gradient = self._vocab_layers.last_gradient(microbatch)
        else:
            gradient = self._store.take(Slot.GRADIENT, microbatch, at=stage)
        leaf, output = self._store.take(Slot.CHUNK_GRAPH, microbatch, at=chunk)
        self._model.backward(chunk, microbatch, output, gradient)
        if stage == self._last:
            self._vocab_layers.finish_last(microbatch)
        if self._split_backward:
            self._store.put(Slot.LEFT_FOR_W, microbatch, None, at=chunk)
        if stage == 0:
            self._vocab_layers.first_gradient(microbatch, leaf)
        else:
            self._store.put(Slot.GRADIENT, microbatch, leaf.grad.contiguous(), at=stage - 1)

    def _whole_backward(self, microbatch: int, chunk: int) -> None:
        """Run a whole backward: if the schedule splits other backwards, the model leaves the weights' part to a W,
        which runs here at once.
        """
        self._backward(microbatch, chunk)
        if self._split_backward:
            self._weight_gradient(microbatch, chunk)

    def _weight_gradient(self, microbatch: int, chunk: int) -> None:
        self._model.weight_gradient(chunk, microbatch)
        self._store.take(Slot.LEFT_FOR_W, microbatch, at=chunk)
