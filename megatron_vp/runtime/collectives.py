"""Runs the vocabulary collectives of one iteration, and defines the data that each collective moves between passes.

All collectives run on the second stream, in the order that the lowered program fixes. Their buffers are allocated on
the compute stream (`megatron_vp.runtime.streams` explains why).

The members of the collectives are the ranks with vocabulary rows and the ranks that read tokens or labels, receive
embedding rows, or send the output layer's input. A member without rows contributes neutral values: no embedding rows,
the statistics of an empty shard, and zero gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_vp.runtime.iteration import Iteration, LayerShards
from megatron_vp.runtime.store import Slot
from megatron_vp.runtime.streams import Event, Stream
from megatron_vp.schedule.instructions import Wait
from megatron_vp.schedule.passes import VocabMethod
from megatron_vp.schedule.transfers import Collective, CollectiveKind
from megatron_vp.vocab.embedding import RowExchange, count_buffer
from megatron_vp.vocab.loss import MAX, GlobalStatistics, statistics_dtype
from megatron_vp.vocab.operations import operations_for
from megatron_vp.vocab.output import PendingOutput

Action = Callable[[], None]
Parts = tuple[Action, list[tuple[Slot, Any, int]]]
"""A collective on the second stream, and its results for the store: slot, value, and how often the value is used."""


class VocabularyCollectives:
    """Posts and completes the collectives of one iteration on one rank."""

    def __init__(self, iteration: Iteration, layer_shards: LayerShards, stream: Stream) -> None:
        groups, shapes, gradients = iteration.groups, iteration.shapes, iteration.gradients
        schedule, placement = iteration.schedule, iteration.schedule.placement
        self._groups, self._shapes, self._store = groups, shapes, iteration.store
        self._observer = iteration.observer
        self._communicator: Any = groups.vocabulary  # None on ranks that take part in no collective.
        self._stream = stream
        self._layer_shards = layer_shards
        self._holds_rows = layer_shards.holds_rows
        self._gradients = gradients
        self._reduces_in_c1 = gradients and schedule.vocab is VocabMethod.VOCAB_2
        self._holds_first = groups.rank == placement.first_rank
        self._holds_last = groups.rank == placement.last_rank
        self._holds_mtp = shapes.words_stage in placement.stage_of[groups.rank]
        self._word_ranks = sorted(placement.word_ranks(shapes.words_stage))
        self._has_words = groups.rank in self._word_ranks
        self._runs_loss = groups.rank == len(groups.members) - 1
        self._counts = count_buffer(schedule.microbatches, len(groups.members), shapes.device)
        # The collectives whose results this rank uses.
        self._awaited = frozenset(
            instruction.operation
            for instruction in iteration.program.instructions
            if isinstance(instruction, Wait) and isinstance(instruction.operation, Collective)
        )
        self._unawaited: list[Event] = []

    def post(self, collective: Collective) -> Action | None:
        """Start a collective on the second stream. The function that is returned makes later passes wait for it, and
        puts its result into the store; None if this rank does not use the result.
        """
        # Each kind of collective has a method of its name.
        communicate, results = getattr(self, f"_{collective.kind.lower()}")(collective.microbatch, collective.root)

        def observed() -> None:
            with self._observer(collective):
                communicate()

        event = self._stream.submit(observed)
        if collective not in self._awaited:
            self._unawaited = [earlier for earlier in self._unawaited if not earlier.done()] + [event]
            return None

        def wait() -> None:
            if collective.kind is CollectiveKind.TOKENS:
                # The host needs the sizes of the row exchange. TOKENS was posted at least one microbatch earlier, so
                # the host waits only for the second stream to run TOKENS, not for the compute stream to drain.
                event.host_wait()
            event.wait()
            for slot, value, uses in results:
                self._store.put(slot, collective.microbatch, value, uses=uses)

        return wait

    def finish(self) -> None:
        """End the iteration: make later work wait for the second stream."""
        self._stream.synchronise()
        self._unawaited.clear()

    def _tokens(self, microbatch: int, root: int) -> Parts:
        """Broadcast token ids from the first pipeline rank, and labels from the last pipeline rank, to all members."""
        last = len(self._groups.members) - 1
        rank, shapes = self._groups.rank, self._shapes.of(microbatch)
        tokens_be = self._store.take(Slot.TOKENS, microbatch) if rank == 0 else shapes.token_ids()
        labels_be = self._store.take(Slot.LABELS, microbatch) if rank == last else shapes.token_ids()

        groups, shards = self._groups, self._layer_shards.shards
        exchange = RowExchange(
            tokens_be.view(-1), shards, groups.tensor_size, groups.tensor_rank, self._counts[microbatch]
        )
        labels_n = labels_be.new_empty(shapes.outputs)

        def communicate() -> None:
            self._communicator.broadcast(tokens_be, 0)
            self._communicator.broadcast(labels_be, last)
            if self._holds_rows or self._has_words:
                exchange.plan()
            if not self._holds_rows:
                return
            for depth, target in enumerate(shapes.predictions_of(labels_n)):
                target.copy_(shapes.ahead(labels_be, depth).t().unflatten(0, (shapes.sp_size, -1)))

        # EMBED and EMBED_GRAD use the exchange, and ranks with rows also use it in IF and IB.
        uses = (1 + self._holds_rows) * (1 + self._gradients)
        return communicate, [(Slot.ROW_EXCHANGE, exchange, uses), (Slot.TARGETS, labels_n, int(self._holds_rows))]

    def _embed(self, microbatch: int, root: int) -> Parts:
        """Send embedding rows from their owners to virtual stage 0 and to the stage of multi-token prediction, if any.

        Each pipeline of a replica sends the rows of its own shards; the tensor ranks of the receiving stage then add up
        the rows from all pipelines.
        """
        exchange = self._row_exchange(microbatch)
        own_kh = self._store.take(Slot.OWN_ROWS, microbatch) if self._holds_rows else self._shapes.rows(0)
        outgoing = self._to_word_ranks(len(own_kh))
        sent_kh = own_kh.repeat(len(self._word_ranks), 1) if len(self._word_ranks) > 1 else own_kh
        incoming = exchange.counts if self._has_words else self._to_word_ranks(0)
        received_kh = self._shapes.rows(sum(incoming))
        words_nh = self._shapes.rows(len(exchange.tokens_n) if self._has_words else 0)

        def communicate() -> None:
            self._communicator.exchange(received_kh, sent_kh, incoming, outgoing)
            if self._has_words:
                exchange.assemble(received_kh, words_nh)
                if self._groups.tensor is not None:
                    dist.all_reduce(words_nh, group=self._groups.tensor)

        return communicate, [
            (Slot.EMBEDDING, words_nh, int(self._holds_first)),
            (Slot.MTP_EMBEDDING, words_nh.detach(), int(self._holds_mtp)),
        ]

    def _c0(self, microbatch: int, root: int) -> Parts:
        """Send X, the output of the last virtual stage, to all members."""
        shapes, whole = self._shapes.of(microbatch), self._shapes.sp_size == 1
        if self._holds_last:
            own_nh = self._store.take(Slot.LAST_OUTPUT, microbatch)
        else:
            own_nh = shapes.rows(shapes.outputs // shapes.sp_size)
        gathers = self._holds_rows and not whole
        x_nh = shapes.rows(shapes.outputs) if gathers else own_nh

        def communicate() -> None:
            self._communicator.broadcast(own_nh, root)
            if gathers:
                dist.all_gather_into_tensor(x_nh, own_nh, self._groups.tensor)

        return communicate, [(Slot.X, x_nh, 1)]

    def _c1(self, microbatch: int, root: int) -> Parts:
        """Gather the statistics on all members; with vocab-2, also reduce the input gradient to the last stage."""
        pending: PendingOutput | None = None
        output = self._layer_shards.output
        if self._holds_rows:
            pending = self._store.take(Slot.PENDING_OUTPUT, microbatch)
        statistics_3n = self._no_statistics(microbatch) if pending is None else pending.statistics_3n
        operations = operations_for(statistics_3n)
        # All tensor ranks of a stage without rows have the same statistics, which therefore need not be combined.
        tensor, stage_3n = self._groups.tensor if self._holds_rows else None, statistics_3n
        gathered_r3n = statistics_3n.new_empty((len(self._groups.vocab_members), *statistics_3n.shape))
        total_3n = torch.empty_like(statistics_3n)
        total = GlobalStatistics(*total_3n.unbind())
        if tensor is not None:
            gathered_t3n = statistics_3n.new_empty((self._groups.tensor_size, *statistics_3n.shape))
            stage_3n = torch.empty_like(statistics_3n)
        gradient_nh = None
        if self._reduces_in_c1:
            part_nh = (
                self._store.take(Slot.UNSCALED_GRAD, microbatch) if self._holds_rows else self._no_gradient(microbatch)
            )
            reduce, gradient_nh = self._reduction_to_last_stage(part_nh, root)

        def communicate() -> None:
            if tensor is not None:
                dist.all_gather_into_tensor(gathered_t3n.flatten(0, 1), statistics_3n, tensor)
                operations.fold_(stage_3n, gathered_t3n)
            self._communicator.all_gather(gathered_r3n, stage_3n)
            operations.fold_(total_3n, gathered_r3n)
            if gradient_nh is not None:
                if pending is not None and output is not None:
                    output.rescaled_input_gradient(part_nh, pending, total)
                reduce()

        uses = self._runs_loss + (self._gradients and self._holds_rows)
        reduced = gradient_nh is not None and self._holds_last
        return communicate, [(Slot.STATISTICS, total, uses), (Slot.OUTPUT_GRAD, gradient_nh, int(reduced))]

    def _c2(self, microbatch: int, root: int) -> Parts:
        """Reduce the input gradient to the last virtual stage (vocab-1 only). T has computed this rank's part."""
        part_nh = self._store.take(Slot.GRAD_PART, microbatch) if self._holds_rows else self._no_gradient(microbatch)
        reduce, gradient_nh = self._reduction_to_last_stage(part_nh, root)
        return reduce, [(Slot.OUTPUT_GRAD, gradient_nh, 1)]

    def _loss_grad(self, microbatch: int, root: int) -> Parts:
        """Broadcast g, one or two numbers per token, from the rank that runs the loss function to all members."""
        if self._runs_loss:
            token_loss_grad_n = self._store.take(Slot.OWN_LOSS_GRAD, microbatch)
        else:
            token_loss_grad_n = self._shapes.of(microbatch).token_loss_grads()
        uses = self._holds_rows + self._holds_last
        return lambda: self._communicator.broadcast(token_loss_grad_n, root), [
            (Slot.LOSS_GRAD, token_loss_grad_n, uses)
        ]

    def _embed_grad(self, microbatch: int, root: int) -> Parts:
        """Send the gradients of embedding rows back to the rows' owners, even if the embedding is frozen."""
        exchange = self._row_exchange(microbatch)
        gradients_nh = []
        if self._holds_first:
            gradients_nh.append(self._store.take(Slot.EMBEDDING_GRAD, microbatch))
        if self._holds_mtp:
            gradients_nh.append(self._store.take(Slot.MTP_EMBEDDING_GRAD, microbatch))
        outgoing = exchange.counts if self._has_words else self._to_word_ranks(0)
        outgoing_nh = exchange.sort_by_owner(sum(gradients_nh)) if self._has_words else self._shapes.rows(0)
        own = exchange.counts[self._groups.rank] if self._holds_rows else 0
        incoming = self._to_word_ranks(own)
        received_kh = self._shapes.rows(sum(incoming))

        def communicate() -> None:
            self._communicator.exchange(received_kh, outgoing_nh, incoming, outgoing)

        parts = received_kh.view(len(self._word_ranks), own, self._shapes.hidden)
        return communicate, [(Slot.OWN_ROW_GRADS, parts, 1)]

    def _reduction_to_last_stage(self, part_nh: torch.Tensor, root: int) -> tuple[Action, torch.Tensor]:
        """Return a function and a buffer. The function sums the ranks' parts of dX / g in the last stage's buffer. The
        last stage later multiplies the sum by g to get dX (see `Slot`).

        With sequence parallelism, every stage first reduces over its tensor ranks, so that each tensor rank sends only
        the rows of its own tokens.
        """
        shapes, tensor = self._shapes, self._groups.tensor
        whole = shapes.sp_size == 1
        scatters = self._holds_rows and not whole
        sum_nh = shapes.rows(len(part_nh) // shapes.sp_size) if scatters else part_nh

        def communicate() -> None:
            if scatters:
                dist.reduce_scatter_tensor(sum_nh, part_nh, group=tensor)
            self._communicator.reduce(sum_nh, root)
            if whole and tensor is not None and self._holds_last:
                dist.all_reduce(sum_nh, group=tensor)

        return communicate, sum_nh

    def _row_exchange(self, microbatch: int) -> Any:
        """Take the row exchange from the store; return None on a rank that neither owns nor receives embedding rows."""
        used = self._holds_rows or self._has_words
        return self._store.take(Slot.ROW_EXCHANGE, microbatch) if used else None

    def _no_statistics(self, microbatch: int) -> torch.Tensor:
        """The statistics of an empty shard, [3 or 4, outputs]."""
        shapes = self._shapes.of(microbatch)
        dtype = statistics_dtype(shapes.dtype)
        statistics_3n = torch.zeros(
            self._layer_shards.loss.statistics, shapes.outputs, dtype=dtype, device=shapes.device
        )
        statistics_3n[MAX].fill_(-torch.inf)
        return statistics_3n

    def _no_gradient(self, microbatch: int) -> torch.Tensor:
        """Zeros [outputs / sp_size, h]: the part of dX / g that a rank without rows contributes."""
        shapes = self._shapes.of(microbatch)
        return shapes.rows(shapes.outputs // shapes.sp_size).zero_()

    def _to_word_ranks(self, count: int) -> list[int]:
        return [count if rank in self._word_ranks else 0 for rank in range(len(self._groups.members))]
