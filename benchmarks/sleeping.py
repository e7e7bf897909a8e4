"""A model whose passes take exactly a given time, and use no core meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from sleeping_device import SleepingDevice

from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.iteration import LayerShards
from megatron_vp.schedule import Costs, Pass, PassKind, Schedule, VocabMethod
from megatron_vp.vocab.embedding import EmbeddingLayer, RowExchange
from megatron_vp.vocab.output import OutputLayer, PendingOutput
from megatron_vp.vocab.shards import VocabShards

SHAPES = Shapes(sequence=16, batch=1, hidden=16, dtype=torch.float32, device=torch.device("cpu"))
VOCABULARY = 256


class SleepingModel:
    """A rank's chunks, whose forwards and backwards sleep and pass tensors on unchanged."""

    def __init__(self, schedule: Schedule, rank: int, costs: Costs, device: SleepingDevice) -> None:
        self._lasting = device.lasting
        self._seconds = {
            (kind, chunk): costs.duration(schedule, rank, Pass(kind, 0, chunk))
            for kind in (PassKind.F, PassKind.B, PassKind.W)
            for chunk in range(schedule.chunks)
        }
        stages = schedule.placement.stage_of[rank]
        self._ends = schedule.vocab is VocabMethod.NONE and schedule.placement.stages - 1 in stages
        self._tokens_bs = torch.randint(VOCABULARY, (SHAPES.batch, SHAPES.sequence))

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Return arbitrary token ids."""
        return self._tokens_bs

    labels = tokens

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """Return the embeddings in the layout of an activation."""
        return words_bsh.transpose(0, 1).contiguous()

    def load(self, chunk: int, microbatch: int) -> None:
        """Do nothing, because whole vocabulary layers sleep together with their chunks."""

    def forward(self, chunk: int, microbatch: int, input_sbh: torch.Tensor | None, labels_bs: None) -> torch.Tensor:
        """Sleep. With a whole output layer and one chunk per rank, the last chunk returns losses by token."""
        with self._lasting(self._seconds[PassKind.F, chunk]):
            if input_sbh is None:
                input_sbh = SHAPES.activation().zero_().requires_grad_()
            return input_sbh.sum(-1).t() if self._ends else input_sbh * 1.0

    def release_output(self, output_sbh: torch.Tensor) -> None:
        """Do nothing."""

    def backward(self, chunk: int, microbatch: int, output_sbh: torch.Tensor, gradient_sbh: torch.Tensor) -> None:
        """Sleep, and compute the gradients that are passed on."""
        with self._lasting(self._seconds[PassKind.B, chunk]):
            output_sbh.backward(gradient_sbh)

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Sleep."""
        with self._lasting(self._seconds[PassKind.W, chunk]):
            pass

    def loss(self, microbatch: int, token_loss_bs: torch.Tensor, target_is_argmax_bs: torch.Tensor) -> torch.Tensor:
        """Return gradients of one."""
        return torch.ones_like(token_loss_bs)


class SleepingOutput(OutputLayer):
    """S and T of a tiny shard, with results of the right shape, which are made in advance or during the pass.

    `forward` sleeps for the whole S of vocab-2.
    """

    seconds: Mapping[PassKind, float]
    device: SleepingDevice

    @cached_property
    def _x_nh(self) -> torch.Tensor:
        return SHAPES.rows(SHAPES.tokens).zero_()

    @cached_property
    def _pending(self) -> PendingOutput:
        return super().forward(self._x_nh, torch.zeros(SHAPES.tokens, dtype=torch.int64))

    def forward(self, *arguments: object) -> PendingOutput:
        """Sleep for pass S."""
        with self.device.lasting(self.seconds[PassKind.S]):
            self._unscaled_nh = self._x_nh.clone()
            return self._pending

    def unscaled_input_gradient(self, pending: PendingOutput) -> torch.Tensor:
        """Return the gradient that `forward` prepared."""
        return self._unscaled_nh

    def rescaled_input_gradient(self, unscaled_nh: torch.Tensor, *arguments: object) -> torch.Tensor:
        """Return the gradient unchanged."""
        return unscaled_nh

    def t_pass(self, *arguments: object, input_gradient: bool) -> torch.Tensor | None:
        """Sleep for pass T."""
        with self.device.lasting(self.seconds[PassKind.T]):
            return self._x_nh.clone() if input_gradient else None


class SleepingEmbedding(EmbeddingLayer):
    """IF and IB of a tiny shard, which exchange one row per token."""

    seconds: Mapping[PassKind, float]
    device: SleepingDevice

    def forward(self, exchange: RowExchange) -> torch.Tensor:
        """Sleep for pass IF."""
        with self.device.lasting(self.seconds[PassKind.IF]):
            return SHAPES.rows(exchange.counts[self.index])

    def backward_pass(self, *arguments: object) -> None:
        """Sleep for pass IB."""
        with self.device.lasting(self.seconds[PassKind.IB]):
            pass


def sleeping_layers(
    schedule: Schedule,
    rank: int,
    costs: Costs,
    device: SleepingDevice,
    vocabulary: int = VOCABULARY,
    stage_rows: tuple[int, ...] | None = None,
) -> LayerShards:
    """A rank's shards of a vocabulary of tiny rows, whose passes sleep on `device`; without rows, it has none."""
    shards = VocabShards(vocabulary, schedule.pipeline_size, stage_rows=stage_rows)
    if not shards.rows(rank):
        return LayerShards(shards, None, None)
    weights = [torch.nn.Parameter(torch.randn(shards.rows(rank), SHAPES.hidden)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    layers = SleepingEmbedding(weights[0], shards, rank), SleepingOutput(weights[1], shards, rank)
    for layer in layers:
        layer.device = device
        layer.seconds = {kind: costs.duration(schedule, rank, Pass(kind, 0)) for kind in schedule.vocab.passes}
    return LayerShards(shards, *layers)
