"""Sizes of a microbatch, and buffers for the tensors that ranks exchange."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch


@dataclass(frozen=True)
class Shapes:
    """Sizes of one microbatch: b sequences of s tokens, hidden size h; the n = s * b tokens are in s-major order.

    The last stage outputs one row per token and prediction. The rows are ordered by sequence-parallel rank, then by
    prediction, then by token.

    mtp_depth: number of tokens that multi-token prediction predicts beyond the next one, if our passes compute them.
    mtp_stage: virtual stage of multi-token prediction, whose output holds the states of all predictions, or None.
    unsharded_mtp_depth: as `mtp_depth`, if Megatron's own output layer computes the predictions.
    cp_chunks: with context parallelism, the s positions consist of this many equally long chunks of a longer sequence.
    sp_size, sp_rank: number of ranks over which sequence parallelism splits activations along s, and this rank's
        position among these ranks.
    sizes: b and s of every microbatch; empty if all have the same.
    values: number of values per token that ranks exchange for the loss function: its token loss and, in some jobs, its
        entropy.
    random_vocab: 0, or the vocabulary size in a replay of one rank. Buffers for data from peers are then filled with
        finite numbers of ordinary magnitude, because a GPU's clock depends on the values, and NaN or denormal numbers
        are slow on a CPU.
    """

    sequence: int
    batch: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    _: KW_ONLY
    mtp_depth: int = 0
    mtp_stage: int | None = None
    unsharded_mtp_depth: int = 0
    cp_chunks: int = 1
    sp_size: int = 1
    sp_rank: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    values: int = 1
    random_vocab: int = 0

    def of(self, microbatch: int) -> Shapes:
        """The sizes of one of several microbatches that differ."""
        if not self.sizes:
            return self
        batch, sequence = self.sizes[microbatch]
        return replace(self, batch=batch, sequence=sequence, sizes=())

    @property
    def tokens(self) -> int:
        """n, the number of tokens in a microbatch."""
        return self.sequence * self.batch

    @property
    def predictions(self) -> int:
        """Number of tokens predicted at each position: the next token and `mtp_depth` tokens beyond it."""
        return 1 + self.mtp_depth

    @property
    def outputs(self) -> int:
        """Number of rows of the last stage's output: one per token and prediction."""
        return self.predictions * self.tokens

    @property
    def own_outputs(self) -> slice:
        """Slice of the last stage's output rows that this rank holds if it belongs to the last stage."""
        size = self.outputs // self.sp_size
        return slice(self.sp_rank * size, (self.sp_rank + 1) * size)

    def by_output(self, values_ks: torch.Tensor) -> torch.Tensor:
        """Reorder values [predictions * b, s] to match the rows of the last stage's output, [outputs]."""
        by_part = values_ks.view(self.predictions, self.batch, self.sp_size, -1)
        return by_part.permute(2, 0, 3, 1).flatten()

    def by_sequence(self, values_n: torch.Tensor) -> torch.Tensor:
        """Reorder values [outputs], one per row of the last stage's output, to [predictions * b, s], contiguous."""
        by_part = values_n.view(self.sp_size, self.predictions, -1, self.batch)
        return by_part.permute(1, 3, 0, 2).contiguous().view(-1, self.sequence)

    def predictions_of(self, values_n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split values [outputs], one per row of the last stage's output, into one view per prediction. Each view has
        the shape [sp_size, s / sp_size, b].
        """
        return values_n.view(self.sp_size, self.predictions, -1, self.batch).unbind(1)

    def ahead(self, values_be: torch.Tensor, depth: int) -> torch.Tensor:
        """For each of the s positions, the value that is `depth` positions later, as [b, s, ...].

        `values_be` [b, e, ...] is laid out like `token_ids`.
        """
        if not depth:
            return values_be[:, : self.sequence]
        own, following = (
            each.unflatten(1, (self.cp_chunks, -1)) for each in values_be.tensor_split([self.sequence], dim=1)
        )
        # If `depth` exceeds a chunk's length, the first positions that follow the chunk are not needed.
        skipped = max(0, depth - own.shape[2])
        return torch.cat([own[:, :, depth:], following[:, :, skipped:depth]], dim=2).flatten(1, 2)

    @property
    def words_stage(self) -> int | None:
        """The virtual stage of multi-token prediction if our passes compute it: it needs embedding rows, as stage 0."""
        return self.mtp_stage if self.mtp_depth else None

    def states(self, stage: int) -> int:
        """Number of hidden states per token that a stage receives: one per prediction behind `mtp_stage`."""
        behind = self.mtp_stage is not None and stage > self.mtp_stage
        return 1 + (self.mtp_depth + self.unsharded_mtp_depth) * behind

    def _buffer(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype or self.dtype, device=self.device)
        if self.random_vocab and dtype is None:
            buffer.normal_()
        elif self.random_vocab:
            buffer.random_(self.random_vocab) if dtype is torch.int64 else buffer.fill_(1 / self.tokens)
        return buffer

    def activation(self, stage: int) -> torch.Tensor:
        """Allocate the input of a stage, [states s / sp_size, b, h], in the model's dtype."""
        return self._buffer(self.states(stage) * self.sequence // self.sp_size, self.batch, self.hidden)

    def rows(self, count: int) -> torch.Tensor:
        """Allocate `count` rows, [count, h], in the model's dtype."""
        return self._buffer(count, self.hidden)

    def token_loss_grads(self) -> torch.Tensor:
        """Allocate a buffer for g, the gradient with respect to the token losses, fp32 [outputs]; [2, outputs] with the
        gradient with respect to entropies.
        """
        return self._buffer(*self._rows(), self.outputs, dtype=torch.float32)

    def token_ids(self) -> torch.Tensor:
        """Allocate an int64 buffer [b, e] for the ids of the s positions and of the positions that follow them. The
        buffer starts with the s positions. Then it holds, for each of the `cp_chunks` chunks, the `mtp_depth` positions
        that follow the chunk, so e is s + cp_chunks * mtp_depth. Positions beyond the end of the sequence hold token 0,
        as in Megatron.
        """
        return self._buffer(self.batch, self.sequence + self.cp_chunks * self.mtp_depth, dtype=torch.int64)

    def token_values(self) -> torch.Tensor:
        """Allocate an fp32 buffer [b, s] for per-token losses or gradients; [2, b, s] with entropies."""
        return self._buffer(*self._rows(), self.batch, self.sequence, dtype=torch.float32)

    def _rows(self) -> tuple[int, ...]:
        return () if self.values == 1 else (self.values,)
