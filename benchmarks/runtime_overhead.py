"""What the runtime adds to a schedule: real processes and real communication, computation replaced by sleep.

    python benchmarks/runtime_overhead.py [--ranks 8] [--microbatches 32] [--pass-ms 20] [--schedule 1f1b ...]

A sleeping rank needs no core, so eight ranks fit on two. Every pass sleeps for its cost; messages, collectives, second
stream and bookkeeping are the runtime's own. Printed is the measured iteration time over the one that the simulator
predicts with free communication: what is above 1 is launch, communication that no pass hides, and late wake-ups.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron_vp.runtime.collectives import VocabularyLayers
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.model import Shapes
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.schedule import Channel, PassCosts, VocabMethod, generate, lower, simulate
from megatron_vp.schedule.unfold import unfold
from megatron_vp.vocab.embedding import EmbeddingLayer, RowExchange
from megatron_vp.vocab.loss import CROSS_ENTROPY, TokenLoss
from megatron_vp.vocab.output import OutputLayer, PendingOutput
from megatron_vp.vocab.shards import VocabShards
from megatron_vp.vocab.statistics import GlobalStatistics

SHAPES = Shapes(sequence=16, batch=1, hidden=16, dtype=torch.float32, device=torch.device("cpu"))
VOCABULARY = 256
UNITS = {"F": 1.0, "B": 1.0, "W": 1.0, "S": 0.25, "T": 0.25, "IF": 0.05, "IB": 0.05}
METHODS = {"1f1b": "vocab-2", "v-half": "vocab-2", "interlaced": "interlaced"}


class SleepingModel:
    """A rank's chunks: forward and backward sleep and pass tensors on unchanged."""

    def __init__(self, forward: float, backward: float, weight: float) -> None:
        self.forward_seconds, self.backward_seconds, self.weight_seconds = forward, backward, weight

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Any token ids."""
        return torch.randint(VOCABULARY, (SHAPES.batch, SHAPES.sequence))

    labels = tokens

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        """The words, as an activation."""
        return words_bsh.transpose(0, 1).contiguous()

    def forward(self, chunk: int, microbatch: int, input_sbh: torch.Tensor, labels_bs: None) -> torch.Tensor:
        """Sleep."""
        time.sleep(self.forward_seconds)
        return input_sbh * 1.0

    def release_output(self, output_sbh: torch.Tensor) -> None:
        """Nothing to free."""

    def backward(self, chunk: int, microbatch: int, output_sbh: torch.Tensor, gradient_sbh: torch.Tensor) -> None:
        """Sleep, and make the gradients that travel on."""
        time.sleep(self.backward_seconds)
        output_sbh.backward(gradient_sbh)

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Sleep."""
        time.sleep(self.weight_seconds)

    def loss(self, microbatch: int, token_loss_bs: torch.Tensor, likeliest_bs: torch.Tensor) -> torch.Tensor:
        """A row factor of one."""
        return torch.ones_like(token_loss_bs)

    def gradient_complete(self, parameter: torch.nn.Parameter) -> None:
        """Nobody waits for it."""


class SleepingOutput(OutputLayer):
    """S and T of a tiny shard, after a sleep."""

    seconds = (0.0, 0.0)

    def forward(self, x_nh: torch.Tensor, labels_n: torch.Tensor, loss: TokenLoss = CROSS_ENTROPY) -> PendingOutput:
        """Pass S."""
        time.sleep(self.seconds[0])
        return super().forward(x_nh, labels_n, loss)

    def t_pass(
        self, pending: PendingOutput, total: GlobalStatistics, row_gradient_n: torch.Tensor, *, input_gradient: bool
    ) -> torch.Tensor | None:
        """Pass T."""
        time.sleep(self.seconds[1])
        return super().t_pass(pending, total, row_gradient_n, input_gradient=input_gradient)


class SleepingEmbedding(EmbeddingLayer):
    """IF and IB of a tiny shard, after a sleep."""

    seconds = (0.0, 0.0)

    def forward(self, exchange: RowExchange) -> torch.Tensor:
        """Pass IF."""
        time.sleep(self.seconds[0])
        return super().forward(exchange)

    def backward_pass(self, exchange: RowExchange, gradient_kh: torch.Tensor) -> None:
        """Pass IB."""
        time.sleep(self.seconds[1])
        super().backward_pass(exchange, gradient_kh)


def _rank(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    ranks = options.ranks
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    shards = VocabShards(VOCABULARY, ranks)
    costs = PassCosts(**{name: value * options.pass_ms / 1000 for name, value in UNITS.items()})
    weights = [torch.nn.Parameter(torch.randn(shards.rows(rank), SHAPES.hidden)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    layers = VocabularyLayers(SleepingEmbedding(weights[0], shards, rank), SleepingOutput(weights[1], shards, rank))
    layers.embedding.seconds, layers.output.seconds = (costs.IF, costs.IB), (costs.S, costs.T)
    for name in options.schedule:
        planned = generate(name, ranks, options.microbatches, vocab=VocabMethod(METHODS[name]), costs=costs)
        schedule, predicted = unfold(planned), simulate(planned, costs).makespan
        program = lower(schedule, costs)[rank]
        weight_seconds = costs.W / schedule.chunks
        split = schedule.split_backward
        model = SleepingModel(
            costs.F / schedule.chunks,
            costs.B / schedule.chunks + (0.0 if split else weight_seconds),
            weight_seconds,
        )
        seats = [
            (schedule.placement.rank_of(s), schedule.placement.rank_of(s + 1))
            for s in range(schedule.placement.stages - 1)
        ]
        edges = {(a, b, Channel.ACTIVATION) for a, b in seats if a != b} | {
            (b, a, Channel.GRADIENT) for a, b in seats if a != b
        }
        pipeline = Pipeline(PipelineGroups.create([range(ranks)], edges))
        times = []
        for _ in range(options.iterations + 1):
            dist.barrier()
            start = time.perf_counter()
            pipeline.run(schedule, program, model, layers, SHAPES, gradients=True)
            dist.barrier()
            times.append(time.perf_counter() - start)
        if rank == 0:
            measured = statistics.median(times[1:])  # the first one connects the communicators
            row = {"schedule": name, "predicted_s": predicted, "measured_s": measured, "ratio": measured / predicted}
            print(
                json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
            )
            if options.output:
                settings = {name: getattr(options, name) for name in ("ranks", "microbatches", "pass_ms", "iterations")}
                machine = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
                with Path(options.output).open("a") as file:
                    file.write(json.dumps(row | settings | machine) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Run every schedule on its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--pass-ms", type=float, default=20.0, help="one unit of cost: F, B and W of a rank")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--schedule", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--output", help="append a line of JSON a schedule to this file")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_rank, (options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
