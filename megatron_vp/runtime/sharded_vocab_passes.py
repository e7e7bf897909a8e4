"""Sharded vocabulary layers: the passes IF, S, T and IB, and the data that they exchange with F and B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_vp.runtime.chunk_passes import ChunkPasses
from megatron_vp.runtime.iteration import Handler, Iteration, LayerShards
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.store import Slot
from megatron_vp.schedule.passes import PassKind, VocabMethod


class ShardedVocabPasses(ChunkPasses):
    """Runs the passes of a rank's chunks and vocabulary shards, with the method vocab-1 or vocab-2. Rank 0 reads token
    ids, and rank p-1 reads labels.
    """

    def __init__(self, iteration: Iteration, layer_shards: LayerShards, offload: Offload | None = None) -> None:
        super().__init__(iteration, offload)
        self._layer_shards = layer_shards
        self._embedding: Any = layer_shards.embedding  # Without rows, the passes that use these layers do not run.
        self._output: Any = layer_shards.output
        self._method = iteration.schedule.vocab
        # Evaluation reports the plain cross entropy, without smoothing or z-loss.
        loss = layer_shards.loss
        self._token_loss = loss if self._gradients else replace(loss, label_smoothing=0.0, z_loss=0.0)

    @property
    def handlers(self) -> dict[PassKind, Handler]:
        """The handlers of all passes; a rank without rows has none of IF, S, T and IB."""
        chunks = super().handlers
        if not self._layer_shards.holds_rows:
            return chunks
        return chunks | {
            PassKind.IF: self._embed,
            PassKind.S: self._output_s,
            PassKind.T: self._output_t,
            PassKind.IB: self._embed_backward,
        }

    def load(self, microbatch: int) -> None:
        """Read token ids on rank 0 and labels on rank p-1, for the collective TOKENS, which sends them to all."""
        if self._reads_tokens:
            self._store.put(Slot.TOKENS, microbatch, self._model.tokens(microbatch))
        if self._reads_labels:
            self._store.put(Slot.LABELS, microbatch, self._model.labels(microbatch))

    def _input(self, microbatch: int, stage: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a chunk's autograd leaf and its input. The leaf of stage 0 holds the embedding rows from all ranks,
        from which the input [s / sp_size, b, h] is computed. Multi-token prediction gets embedding rows of its own.
        """
        if stage == self._shapes.words_stage:
            ahead = self._store.take(Slot.MTP_EMBEDDING, microbatch).requires_grad_()
            self._store.put(Slot.MTP_LEAF, microbatch, ahead)
            self._model.receive_words(ahead)
        if stage:
            return super()._input(microbatch, stage)
        # The leaf is a separate tensor, so that freeing its data leaves the rows intact for multi-token prediction.
        leaf = self._store.take(Slot.EMBEDDING, microbatch).detach().requires_grad_(self._gradients)
        words_bsh = leaf.view(self._shapes.of(microbatch).batch, -1, self._shapes.hidden)
        if self._shapes.mtp_depth:
            words_bsh = words_bsh[:, : self._shapes.sequence]
        return leaf, self._model.embed(microbatch, words_bsh)

    def _give_gradient(self, microbatch: int, stage: int, leaf: Any) -> None:
        """Store the gradient of a chunk's input. Gradients of embedding rows, [b e, h], are for the rows' owners."""
        super()._give_gradient(microbatch, stage, leaf)
        if stage == self._shapes.words_stage:
            ahead = self._store.take(Slot.MTP_LEAF, microbatch)
            self._store.put(Slot.MTP_EMBEDDING_GRAD, microbatch, ahead.grad)
        if stage == 0:
            self._store.put(Slot.EMBEDDING_GRAD, microbatch, leaf.grad)

    def _give_last_output(self, microbatch: int, output: torch.Tensor) -> None:
        """Store X [outputs, h] for pass S of all ranks; with sequence parallelism, store only this rank's rows of X."""
        self._store.put(Slot.LAST_OUTPUT, microbatch, output.view(-1, self._shapes.hidden))

    def _last_gradient(self, microbatch: int) -> torch.Tensor:
        """Multiply dX / g, which has been summed over all ranks, by g. Return dX [s / sp_size, b, h]. With the gradient
        of entropies, T has already computed dX itself.
        """
        unweighted_nh, shapes = self._store.take(Slot.OUTPUT_GRAD, microbatch), self._shapes.of(microbatch)
        token_loss_grad_n = self._store.take(Slot.LOSS_GRAD, microbatch)
        if self._token_loss.entropy_gradient:
            return unweighted_nh.view(-1, shapes.batch, shapes.hidden)
        weighted_nh = unweighted_nh * token_loss_grad_n[shapes.own_outputs, None]
        return weighted_nh.to(unweighted_nh.dtype).view(-1, shapes.batch, shapes.hidden)

    def loss(self, microbatch: int) -> None:
        """Run the user's loss function on token losses, and entropies if requested, computed from the global
        statistics.
        """
        statistics, loss = self._store.take(Slot.STATISTICS, microbatch), self._token_loss
        shapes = self._shapes.of(microbatch)
        values_ks = shapes.by_sequence(statistics.token_loss(loss))
        if loss.entropy:
            values_ks = torch.stack([values_ks, shapes.by_sequence(statistics.entropy_n)])
        gradient_ks = self._model.loss(microbatch, values_ks, shapes.by_sequence(statistics.target_is_argmax_n))
        if gradient_ks is None:
            return
        # The passes compute with logits that are divided by the temperature.
        gradient_ks = gradient_ks.float() / loss.temperature
        rows = (
            [shapes.by_output(each_ks) for each_ks in gradient_ks] if loss.entropy else [shapes.by_output(gradient_ks)]
        )
        self._store.put(Slot.OWN_LOSS_GRAD, microbatch, torch.stack(rows) if loss.entropy_gradient else rows[0])

    def _embed(self, microbatch: int, chunk: int) -> None:
        exchange = self._store.take(Slot.ROW_EXCHANGE, microbatch)
        self._store.put(Slot.OWN_ROWS, microbatch, self._embedding(exchange))

    def _output_s(self, microbatch: int, chunk: int) -> None:
        output = self._output
        x_nh, labels_n = self._store.take(Slot.X, microbatch), self._store.take(Slot.TARGETS, microbatch)
        pending = output(x_nh, labels_n, self._token_loss)
        if not self._gradients:
            pending.exp_nv = pending.x_nh = x_nh.new_empty(0)  # C1 needs only the statistics.
        self._store.put(Slot.PENDING_OUTPUT, microbatch, pending, uses=1 + self._gradients)
        if self._gradients and self._method is VocabMethod.VOCAB_2:
            self._store.put(Slot.UNSCALED_GRAD, microbatch, output.unscaled_input_gradient(pending))

    def _output_t(self, microbatch: int, chunk: int) -> None:
        returns_gradient = self._method is VocabMethod.VOCAB_1
        part_nh = self._output.t_pass(
            self._store.take(Slot.PENDING_OUTPUT, microbatch),
            self._store.take(Slot.STATISTICS, microbatch),
            self._store.take(Slot.LOSS_GRAD, microbatch),
            input_gradient=returns_gradient,
        )
        if returns_gradient:
            self._store.put(Slot.GRAD_PART, microbatch, part_nh)

    def _embed_backward(self, microbatch: int, chunk: int) -> None:
        gradients = self._store.take(Slot.OWN_ROW_GRADS, microbatch)
        exchange = self._store.take(Slot.ROW_EXCHANGE, microbatch)
        for gradient_kh in gradients if self._embedding.weight.requires_grad else ():
            self._embedding.backward_pass(exchange, gradient_kh)
