"""What each pass of one iteration does on one rank: the handlers of compute passes, and of the loss function."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_vp.runtime.collectives import VocabularyLayers
from megatron_vp.runtime.model import Model, Shapes
from megatron_vp.runtime.store import Occupancy, Store
from megatron_vp.schedule.instructions import Channel
from megatron_vp.schedule.passes import Pass, PassKind, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.vocab.loss import CROSS_ENTROPY


class VocabularyPasses:
    """Passes of a schedule with vocabulary passes (vocab-1 or vocab-2).

    Args:
        rank: this pipeline rank.
        placement: which virtual stage each chunk of each rank is.
        method: vocab-1 or vocab-2.
        microbatches: m, to know the last contribution to a weight.
        gradients: False in evaluation.
        split_backward: B is the input gradient alone and a W follows.
    """

    def __init__(
        self,
        store: Store,
        shapes: Shapes,
        layers: VocabularyLayers,
        model: Model,
        rank: int,
        placement: Placement,
        method: VocabMethod,
        microbatches: int,
        gradients: bool,
        split_backward: bool,
    ) -> None:
        self._store = store
        self._shapes = shapes
        self._layers = layers
        self._model = model
        self._rank = rank
        self._placement = placement
        self._method = method
        self._gradients = gradients
        # Evaluation reports the cross entropy, whatever helps training.
        self._token_loss = layers.loss if gradients else CROSS_ENTROPY
        self._split_backward = split_backward
        self._contributions = {layers.embedding.weight: 0, layers.output.weight: 0}
        for layer in (layers.embedding, layers.output):
            self._contributions[layer.weight] += microbatches
        self.in_flight = Occupancy()
        """Passes F whose activations are held for a B, or for a W where there is one, in chunks."""
        self.between_s_and_t = Occupancy()
        """Microbatches whose E and X are held for T."""
        self._passes: dict[PassKind, Callable[[int, int], None]] = {
            PassKind.IF: self._embed,
            PassKind.F: self._forward,
            PassKind.S: self._output_s,
            PassKind.T: self._output_t,
            PassKind.B: self._backward,
            PassKind.W: self._weight_gradient,
            PassKind.IB: self._embed_backward,
        }

    def run(self, action: Pass) -> None:
        """Run one pass."""
        self._passes[action.kind](action.microbatch, action.chunk)

    def loss(self, microbatch: int) -> None:
        """The user's loss function, on the rank that holds the labels."""
        statistics = self._store.take(("statistics", microbatch))
        token_loss_n = statistics.token_loss(self._token_loss)
        row_gradient_bs = self._model.loss(
            microbatch, self._by_sequence(token_loss_n), self._by_sequence(statistics.likeliest_n)
        )
        if row_gradient_bs is not None:
            by_head = row_gradient_bs.float().view(self._shapes.heads, self._shapes.batch, self._shapes.sequence)
            self._store.put(("loss gradient", microbatch), by_head.transpose(1, 2).flatten())

    def _by_sequence(self, values_n: torch.Tensor) -> torch.Tensor:
        """[heads n], each head s-major, as [heads b, s]."""
        by_head = values_n.view(self._shapes.heads, self._shapes.sequence, self._shapes.batch)
        return by_head.transpose(1, 2).contiguous().view(-1, self._shapes.sequence)

    def _embed(self, microbatch: int, chunk: int) -> None:
        exchange = self._store.take(("exchange", microbatch))
        self._store.put(("embedded rows", microbatch), self._layers.embedding(exchange))

    def _forward(self, microbatch: int, chunk: int) -> None:
        stage = self._placement.stage_of[self._rank][chunk]
        if stage == 0:
            leaf = self._store.take(("words", microbatch)).requires_grad_(self._gradients)
            words_nh = leaf if self._shapes.heads == 1 else leaf[1:]
            words_bsh = words_nh.view(self._shapes.batch, self._shapes.sequence, -1)
            chunk_input = self._model.embed(microbatch, words_bsh)
        else:
            leaf = self._store.take((Channel.ACTIVATION, stage, microbatch)).requires_grad_(self._gradients)
            chunk_input = leaf
        is_last = stage + 1 == self._placement.stages
        if is_last and self._shapes.heads > 1:
            ahead = self._store.take(("words ahead", microbatch)).requires_grad_()
            self._store.put(("saved words", microbatch), ahead)
            self._model.receive_words(ahead)
        output = self._model.forward(chunk, microbatch, chunk_input)
        result = output.detach()
        if self._gradients:
            self._model.release_output(output)
            self._store.put(("saved", chunk, microbatch), (leaf, output))
            self.in_flight.enter()
        if is_last:
            self._store.put(("last output", microbatch), result.view(self._shapes.outputs, -1))
        else:
            self._store.put((Channel.ACTIVATION, stage + 1, microbatch), result)

    def _backward(self, microbatch: int, chunk: int) -> None:
        stage = self._placement.stage_of[self._rank][chunk]
        if stage + 1 == self._placement.stages:
            unweighted_nh = self._store.take(("input gradient", microbatch))
            weighted_nh = unweighted_nh * self._store.take(("row gradient", microbatch))[:, None]
            gradient = weighted_nh.to(unweighted_nh.dtype).view(-1, self._shapes.batch, self._shapes.hidden)
        else:
            gradient = self._store.take((Channel.GRADIENT, stage, microbatch))
        leaf, output = self._store.take(("saved", chunk, microbatch))
        self._model.backward(chunk, microbatch, output, gradient)
        if stage + 1 == self._placement.stages and self._shapes.heads > 1:
            ahead = self._store.take(("saved words", microbatch))
            self._store.put(("word gradient ahead", microbatch), ahead.grad)
        if not self._split_backward:
            self.in_flight.leave()
        if stage == 0:
            self._store.put(("word gradient", microbatch), leaf.grad)
        else:
            self._store.put((Channel.GRADIENT, stage - 1, microbatch), leaf.grad.contiguous())

    def _weight_gradient(self, microbatch: int, chunk: int) -> None:
        self._model.weight_gradient(chunk, microbatch)
        self.in_flight.leave()

    def _output_s(self, microbatch: int, chunk: int) -> None:
        output = self._layers.output
        x_nh, labels_n = self._store.take(("x", microbatch)), self._store.take(("labels", microbatch))
        pending = output(x_nh, labels_n, self._token_loss)
        self._store.put(("pending", microbatch), pending, 1 + self._gradients)
        if self._gradients:
            self.between_s_and_t.enter()
            if self._method is VocabMethod.VOCAB_2:
                self._store.put(("unscaled gradient", microbatch), output.unscaled_input_gradient(pending))

    def _output_t(self, microbatch: int, chunk: int) -> None:
        returns_gradient = self._method is VocabMethod.VOCAB_1
        part_nh = self._layers.output.t_pass(
            self._store.take(("pending", microbatch)),
            self._store.take(("statistics", microbatch)),
            self._store.take(("row gradient", microbatch)),
            input_gradient=returns_gradient,
        )
        self.between_s_and_t.leave()
        if returns_gradient:
            self._store.put(("gradient part", microbatch), part_nh)
        self._contributed(self._layers.output.weight)

    def _embed_backward(self, microbatch: int, chunk: int) -> None:
        exchange = self._store.take(("exchange", microbatch))
        for gradient_kh in self._store.take(("row gradients", microbatch)):
            self._layers.embedding.backward_pass(exchange, gradient_kh)
        self._contributed(self._layers.embedding.weight)

    def _contributed(self, weight: torch.nn.Parameter) -> None:
        self._contributions[weight] -= 1
        if not self._contributions[weight]:
            self._model.gradient_complete(weight)
