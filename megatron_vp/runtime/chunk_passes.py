"""Runs the passes F, B and W of a rank's chunks."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from megatron_vp.runtime.iteration import Handler, Iteration
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.sharded_vocab_layers import ShardedVocabLayers
from megatron_vp.runtime.store import Slot
from megatron_vp.runtime.whole_vocab_layers import WholeVocabLayers
from megatron_vp.schedule.passes import PassKind


class ChunkPasses:
    """Runs the passes F, B and W of a rank's chunks.

    vocab_layers: provide stage 0's input and consume the last stage's output.
    offload: moves activations to host memory; None if all activations stay on the device.
    """

    def __init__(
        self,
        iteration: Iteration,
        vocab_layers: WholeVocabLayers | ShardedVocabLayers,
        offload: Offload | None = None,
    ) -> None:
        self._store = iteration.store
        self._model = iteration.model
        self._vocab_layers = vocab_layers
        self._stages = iteration.placement.stage_of[iteration.rank]
        self._last = iteration.placement.stages - 1
        self._gradients = iteration.gradients
        # Whether B computes only the input gradient and leaves the weight gradients to the pass W.
        self._split_backward = iteration.schedule.split_backward
        self._offload = offload

    @property
    def handlers(self) -> dict[PassKind, Handler]:
        """Handlers of F, B, W and BW.

        The handlers are created on demand: an object that stored its own bound methods would form a reference cycle,
        which only the garbage collector frees.
        """
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
        if saved is not None:
            saved.close(leaf)
        if stage == self._last:
            self._vocab_layers.last_output(microbatch, result)
        else:
            self._store.put(Slot.ACTIVATION, microbatch, result, at=stage + 1)

    def _graph(self, microbatch: int, chunk: int, stage: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run a chunk's forward; return its autograd leaf (None if the chunk contains the embedding) and its output."""
        if stage == 0:
            leaf, chunk_input = self._vocab_layers.first_input(microbatch)
        else:
            leaf = self._store.take(Slot.ACTIVATION, microbatch, at=stage).detach().requires_grad_(self._gradients)
            chunk_input = leaf
        labels = self._vocab_layers.prepare(microbatch, stage)
        return leaf, self._model.forward(chunk, microbatch, chunk_input, labels)

    def _backward(self, microbatch: int, chunk: int) -> None:
        stage = self._stages[chunk]
        if stage == self._last:
            gradient = self._vocab_layers.last_gradient(microbatch)
        else:
            gradient = self._store.take(Slot.GRADIENT, microbatch, at=stage)
        leaf, output = self._store.take(Slot.CHUNK_GRAPH, microbatch, at=chunk)
        self._model.backward(chunk, microbatch, output, gradient)
        self._vocab_layers.finish(microbatch, stage)
        if self._split_backward:
            self._store.put(Slot.LEFT_FOR_W, microbatch, None, at=chunk)
        if stage == 0:
            self._vocab_layers.first_gradient(microbatch, leaf)
        else:
            self._store.put(Slot.GRADIENT, microbatch, leaf.grad.contiguous(), at=stage - 1)

    def _whole_backward(self, microbatch: int, chunk: int) -> None:
        """Run the pass BW, a backward that includes the weight gradients."""
        self._backward(microbatch, chunk)
        if self._split_backward:
            self._weight_gradient(microbatch, chunk)

    def _weight_gradient(self, microbatch: int, chunk: int) -> None:
        self._model.weight_gradient(chunk, microbatch)
        self._store.take(Slot.LEFT_FOR_W, microbatch, at=chunk)
