"""Runs the passes F, B and W of a rank's chunks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from megatron_vp.runtime.iteration import Handler, Iteration
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.store import Slot
from megatron_vp.schedule.passes import Pass, PassKind


class ChunkPasses:
    """Runs the passes F, B and W of a rank's chunks, with unsharded vocabulary layers inside the chunks of the first
    and the last stage. `ShardedVocabPasses` extends this class.

    Rank p-1 reads the labels and runs the loss function. If rank p-1 does not hold the last stage, messages carry
    labels, losses and gradients between rank p-1 and the rank of the last stage.

    offload: moves activations to host memory; None if all activations stay on the device.
    """

    def __init__(self, iteration: Iteration, offload: Offload | None = None) -> None:
        placement, rank = iteration.schedule.placement, iteration.groups.rank
        self._store = iteration.store
        self._model = iteration.model
        self._shapes = iteration.shapes
        self._stages = placement.stage_of[rank]
        self._last = placement.stages - 1
        self._reads_tokens = rank == 0
        self._reads_labels = rank == placement.ranks - 1
        self._labels_travel = iteration.layer_shards is None and placement.last_rank != placement.ranks - 1
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

    def load(self, microbatch: int) -> None:
        """Read token ids on rank 0 and labels on rank p-1. Store the labels if another rank holds the last stage."""
        if self._reads_tokens:
            self._model.load(0, microbatch)
        if self._reads_labels:
            self._model.load(len(self._stages) - 1, microbatch)
            if self._labels_travel:
                self._store.put(Slot.LABELS, microbatch, self._model.labels(microbatch), at=self._last)

    def loss(self, microbatch: int) -> None:
        """Run the user's loss function."""
        token_loss_bs = self._store.take(Slot.TOKEN_LOSS, microbatch, at=self._last)
        gradient_bs = self._model.loss(microbatch, token_loss_bs, None)
        if gradient_bs is not None:
            self._store.put(Slot.TOKEN_GRADIENT, microbatch, gradient_bs.contiguous(), at=self._last)

    def run_pair(self, forward: Pass, backward: Pass) -> None:
        """Run a forward and the backward of another microbatch as one; offloading excludes pairs."""
        _, microbatch, chunk = backward
        labels = self._travelled_labels(*forward[1:])
        leaf, chunk_input = self._input(forward.microbatch, self._stages[forward.chunk])
        gradient = self._output_gradient(microbatch, chunk)
        # The activations of both microbatches are held at once: take those of B only when those of F are stored.
        left, made = self._store.look(Slot.CHUNK_GRAPH, microbatch, at=chunk)
        output = self._model.forward_and_backward(
            (forward.chunk, forward.microbatch, chunk_input, labels), (chunk, microbatch, made, gradient)
        )
        self._keep_output(forward.microbatch, forward.chunk, leaf, output)
        self._store.take(Slot.CHUNK_GRAPH, microbatch, at=chunk)
        self._end_backward(microbatch, chunk, left)

    def _forward(self, microbatch: int, chunk: int) -> None:
        labels = self._travelled_labels(microbatch, chunk)
        with self._offload.saving(microbatch, chunk) if self._offload else nullcontext() as saved:
            leaf, chunk_input = self._input(microbatch, self._stages[chunk])
            output = self._model.forward(chunk, microbatch, chunk_input, labels)
            del chunk_input  # Tensors to which anything else refers are not moved to the host.
        self._keep_output(microbatch, chunk, leaf, output, saved)

    def _travelled_labels(self, microbatch: int, chunk: int) -> torch.Tensor | None:
        stage = self._stages[chunk]
        travelled = stage == self._last and self._labels_travel
        return self._store.take(Slot.LABELS, microbatch, at=stage) if travelled else None

    def _keep_output(self, microbatch: int, chunk: int, leaf: Any, output: torch.Tensor, saved: Any = None) -> None:
        """Store what a forward leaves for its backward and for the next stage."""
        stage = self._stages[chunk]
        result = output.detach()
        if self._gradients:
            self._model.release_output(output)
            self._store.put(Slot.CHUNK_GRAPH, microbatch, (leaf, output), at=chunk)
        if saved is not None:
            saved.close(leaf)
        if stage == self._last:
            self._give_last_output(microbatch, result)
        else:
            self._store.put(Slot.ACTIVATION, microbatch, result, at=stage + 1)

    def _input(self, microbatch: int, stage: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a chunk's autograd leaf and its input; None if the chunk itself embeds its tokens."""
        if stage == 0:
            return None, None
        leaf = self._store.take(Slot.ACTIVATION, microbatch, at=stage).detach().requires_grad_(self._gradients)
        return leaf, leaf

    def _give_last_output(self, microbatch: int, output: torch.Tensor) -> None:
        """Store the token losses, fp32 [b, s]."""
        self._store.put(Slot.TOKEN_LOSS, microbatch, output, at=self._last)

    def _backward(self, microbatch: int, chunk: int) -> None:
        gradient = self._output_gradient(microbatch, chunk)
        leaf, output = self._store.take(Slot.CHUNK_GRAPH, microbatch, at=chunk)
        self._model.backward(chunk, microbatch, output, gradient)
        self._end_backward(microbatch, chunk, leaf)

    def _output_gradient(self, microbatch: int, chunk: int) -> torch.Tensor:
        stage = self._stages[chunk]
        if stage == self._last:
            return self._last_gradient(microbatch)
        return self._store.take(Slot.GRADIENT, microbatch, at=stage)

    def _end_backward(self, microbatch: int, chunk: int, leaf: Any) -> None:
        if self._split_backward:
            self._store.put(Slot.LEFT_FOR_W, microbatch, None, at=chunk)
        self._give_gradient(microbatch, self._stages[chunk], leaf)

    def _last_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the last stage's output: g, with respect to the token losses, fp32 [b, s]."""
        return self._store.take(Slot.TOKEN_GRADIENT, microbatch, at=self._last)

    def _give_gradient(self, microbatch: int, stage: int, leaf: Any) -> None:
        """Store the gradient of a chunk's input. The backward of an embedding has already accumulated its gradient."""
        if stage:
            self._store.put(Slot.GRADIENT, microbatch, leaf.grad.contiguous(), at=stage - 1)

    def _whole_backward(self, microbatch: int, chunk: int) -> None:
        """Run the pass BW, a backward that includes the weight gradients."""
        self._backward(microbatch, chunk)
        if self._split_backward:
            self._weight_gradient(microbatch, chunk)

    def _weight_gradient(self, microbatch: int, chunk: int) -> None:
        self._model.weight_gradient(chunk, microbatch)
        self._store.take(Slot.LEFT_FOR_W, microbatch, at=chunk)
