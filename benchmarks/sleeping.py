"""A model whose passes take exactly as long as they are told to, and cost no core while they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_vp.runtime.collectives import VocabularyLayers
from megatron_vp.runtime.model import Shapes
from megatron_vp.schedule import PassCosts, Schedule
from megatron_vp.vocab.embedding import EmbeddingLayer
from megatron_vp.vocab.output import OutputLayer
from megatron_vp.vocab.shards import VocabShards

SHAPES = Shapes(sequence=16, batch=1, hidden=16, dtype=torch.float32, device=torch.device("cpu"))
VOCABULARY = 256


LATE = 8e-5
"""Seconds by which the kernel ends a sleep late: timer slack, and the way to a core."""


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """A pass of this length: what it really computes is part of it, the rest is slept."""
    end = time.perf_counter() + seconds
    yield
    while (left := end - LATE - time.perf_counter()) > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        pass


class SleepingModel:
    """A rank's chunks: forward and backward sleep and pass tensors on unchanged."""

    def __init__(self, schedule: Schedule, costs: PassCosts) -> None:
        self.forward_seconds = costs.F / schedule.chunks
        self.backward_seconds = (costs.B if schedule.split_backward else costs.B + costs.W) / schedule.chunks
        self.weight_seconds = costs.W / schedule.chunks

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Any token ids."""
        return torch.randint(VOCABULARY, (SHAPES.batch, SHAPES.sequence))

    labels = tokens

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """The words, as an activation."""
        return words_bsh.transpose(0, 1).contiguous()

    def forward(self, chunk: int, microbatch: int, input_sbh: torch.Tensor, labels_bs: None) -> torch.Tensor:
        """Sleep."""
        with lasting(self.forward_seconds):
            return input_sbh * 1.0

    def release_output(self, output_sbh: torch.Tensor) -> None:
        """Nothing to free."""

    def backward(self, chunk: int, microbatch: int, output_sbh: torch.Tensor, gradient_sbh: torch.Tensor) -> None:
        """Sleep, and make the gradients that travel on."""
        with lasting(self.backward_seconds):
            output_sbh.backward(gradient_sbh)

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Sleep."""
        with lasting(self.weight_seconds):
            pass

    def loss(self, microbatch: int, token_loss_bs: torch.Tensor, likeliest_bs: torch.Tensor) -> torch.Tensor:
        """A row factor of one."""
        return torch.ones_like(token_loss_bs)

    def gradient_complete(self, parameter: torch.nn.Parameter) -> None:
        """Nobody waits for it."""


class SleepingOutput(OutputLayer):
    """S and T of a tiny shard. The end of vocab-2's S is not timed: its sleep is in `forward`."""

    costs = PassCosts()

    def forward(self, *arguments: object) -> object:
        """Pass S."""
        with lasting(self.costs.S):
            return super().forward(*arguments)

    def t_pass(self, *arguments: object, **options: object) -> object:
        """Pass T."""
        with lasting(self.costs.T):
            return super().t_pass(*arguments, **options)


class SleepingEmbedding(EmbeddingLayer):
    """IF and IB of a tiny shard."""

    costs = PassCosts()

    def forward(self, *arguments: object) -> object:
        """Pass IF."""
        with lasting(self.costs.IF):
            return super().forward(*arguments)

    def backward_pass(self, *arguments: object) -> None:
        """Pass IB."""
        with lasting(self.costs.IB):
            super().backward_pass(*arguments)


def sleeping_layers(ranks: int, rank: int) -> VocabularyLayers:
    """A rank's shards of a tiny vocabulary; `costs` of each layer say how long its passes sleep."""
    shards = VocabShards(VOCABULARY, ranks)
    weights = [torch.nn.Parameter(torch.randn(shards.rows(rank), SHAPES.hidden)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    return VocabularyLayers(SleepingEmbedding(weights[0], shards, rank), SleepingOutput(weights[1], shards, rank))
