"""A pipeline without Megatron: one tanh layer per rank between the vocabulary layers, and its reference in fp64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_vp.runtime import offload
from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.iteration import LayerShards
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.runtime.trace_writer import PipelineTrace
from megatron_vp.schedule.families import family, generate
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import Schedule, VocabMethod
from megatron_vp.schedule.transfers import Channel
from megatron_vp.vocab.embedding import EmbeddingLayer
from megatron_vp.vocab.output import OutputLayer
from megatron_vp.vocab.shards import VocabShards
from tests.harness.ranks import process_group

VOCAB, HIDDEN, SEQUENCE, BATCH = 23, 6, 5, 2


def parameters(stages: int) -> dict[str, torch.Tensor]:
    """Initial weights by name, fp64, the same on every call."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / HIDDEN**0.5

    layers = {f"layer{stage}": random(HIDDEN, HIDDEN) for stage in range(stages)}
    return {"embedding": random(VOCAB, HIDDEN), **layers, "output": random(VOCAB, HIDDEN)}


def batch(iteration: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels [b, s] and loss weights [b, s] of a microbatch."""
    generator = torch.Generator().manual_seed(100 * iteration + microbatch)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQUENCE), generator=generator)
    return tokens, labels, torch.rand(BATCH, SEQUENCE, generator=generator)


def reference(
    stages: int, microbatches: int, iteration: int, tied: bool, dtype: torch.dtype = torch.float64
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses by microbatch and gradients by name, from autograd in one process, of weights rounded to `dtype`."""
    weights = {name: weight.to(dtype).double().requires_grad_() for name, weight in parameters(stages).items()}
    output = weights["embedding"] if tied else weights["output"]
    losses = []
    for microbatch in range(microbatches):
        tokens, labels, loss_weights = batch(iteration, microbatch)
        hidden = weights["embedding"][tokens]
        for stage in range(stages):
            hidden = torch.tanh(hidden @ weights[f"layer{stage}"]) + hidden
        token_loss = torch.nn.functional.cross_entropy(
            (hidden @ output.t()).flatten(0, 1), labels.flatten(), reduction="none"
        )
        loss = (token_loss * loss_weights.flatten()).sum()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


class ToyModel:
    """Implements the runtime's `Model` for one rank and iteration; `weights`: one for each chunk."""

    def __init__(self, weights: list[torch.nn.Parameter], iteration: int, gradients: bool, split: bool) -> None:
        self.weights = weights
        self.device = weights[0].device
        self.iteration = iteration
        self.gradients = gradients
        self.split = split
        self.left_for_w: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[float] = []

    def tokens(self, microbatch: int) -> torch.Tensor:
        return batch(self.iteration, microbatch)[0].to(self.device)

    def labels(self, microbatch: int) -> torch.Tensor:
        return batch(self.iteration, microbatch)[1].to(self.device)

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        return words_bsh.transpose(0, 1).contiguous()

    def forward(self, chunk: int, microbatch: int, input_sbh: torch.Tensor, labels_bs: None) -> torch.Tensor:
        with torch.set_grad_enabled(self.gradients):
            weight = self.weights[chunk]
            product = input_sbh @ (weight.detach() if self.split else weight)
            if self.split and self.gradients:
                product.retain_grad()
                self.left_for_w[chunk, microbatch] = (input_sbh.detach(), product)
            return torch.tanh(product) + input_sbh

    def release_output(self, output_sbh: torch.Tensor) -> None:
        pass

    def backward(self, chunk: int, microbatch: int, output_sbh: torch.Tensor, gradient_sbh: torch.Tensor) -> None:
        output_sbh.backward(gradient_sbh)

    def forward_and_backward(self, forward: tuple, backward: tuple) -> torch.Tensor:
        output = self.forward(*forward)
        self.backward(*backward)
        return output

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        layer_input, product = self.left_for_w.pop((chunk, microbatch))
        weight, gradient = self.weights[chunk], layer_input.flatten(0, 1).t() @ product.grad.flatten(0, 1)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def loss(
        self, microbatch: int, token_loss_bs: torch.Tensor, target_is_argmax_bs: torch.Tensor
    ) -> torch.Tensor | None:
        assert microbatch == len(self.losses)
        loss_weights = batch(self.iteration, microbatch)[2].to(self.device)
        self.losses.append((token_loss_bs * loss_weights).sum().item())
        return loss_weights if self.gradients else None


def run_pipeline(
    rank: int,
    world: int,
    name: str,
    method: str,
    steps: list[tuple[int, bool]],
    tied: bool,
    trace_folder: Path | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    stage_rows: tuple[int, ...] | None = None,
    offload_chunks: int = 0,
    frozen: tuple[str, ...] = (),
) -> list[tuple[list[float], dict[str, torch.Tensor], float]]:
    """Run iterations (microbatches, gradients) on one rank; of each: losses, gradients, largest load.

    With `trace_folder` every iteration but the first is traced. `stage_rows`: vocabulary rows by rank.
    `offload_chunks`: chunks of each rank of which all that a forward saves leaves the device. `frozen`: of `embedding`
    and `output`, those without gradients.
    """
    offload.LEAST_OFFLOADED = 0
    with process_group(rank, world):
        shards = VocabShards(VOCAB, world, stage_rows=stage_rows)
        schedule_of = partial(
            _schedule,
            name,
            world,
            method=method,
            vocab_ranks=stage_rows and shards.holders,
            offload_chunks=offload_chunks,
        )
        placement = schedule_of(1, gradients=True).placement
        weights = {name: weight.to(device, dtype) for name, weight in parameters(placement.stages).items()}

        def shard(name: str) -> torch.nn.Parameter:
            return torch.nn.Parameter(weights[name][shards.start(rank) : shards.start(rank + 1)].clone())

        names = [f"layer{stage}" for stage in placement.stage_of[rank]]
        embedding, chunks = shard("embedding"), [torch.nn.Parameter(weights[name]) for name in names]
        output = embedding if tied else shard("output")
        for name, weight in (("embedding", embedding), ("output", output)):
            weight.requires_grad_(name not in frozen)
        held = (EmbeddingLayer(embedding, shards, rank), OutputLayer(output, shards, rank))
        own = held if rank in shards.holders else (None, None)
        layers = LayerShards(shards, *own)
        seats = [(placement.rank_of(stage), placement.rank_of(stage + 1)) for stage in range(placement.stages - 1)]
        forward_edges = {(here, there, Channel.ACTIVATION) for here, there in seats if here != there}
        backward_edges = {(there, here, Channel.GRADIENT) for here, there, _ in forward_edges}
        members = placement.vocab_members(shards.holders)
        pipeline = Pipeline(
            PipelineGroups.create([range(world)], forward_edges | backward_edges, vocab_members=members)
        )
        shapes = Shapes(SEQUENCE, BATCH, HIDDEN, dtype, torch.device(device))
        trace = trace_folder and PipelineTrace(trace_folder, range(2, len(steps) + 1), pipeline.groups.pipeline)
        results = []
        for iteration, (microbatches, gradients) in enumerate(steps):
            schedule = schedule_of(microbatches, gradients=gradients)
            for weight in {embedding, output}:
                weight.main_grad = None
                if not weight.requires_grad:
                    continue
                weight.main_grad = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32))
            for weight in chunks:
                weight.grad = None
            model = ToyModel(chunks, iteration, gradients, schedule.split_backward)
            recorder = Recorder(shapes.device) if trace and trace.begin() else None
            observer = recorder.span if recorder else nullcontext
            program = lower(schedule)[rank]
            in_flight = pipeline.run(schedule, program, model, layers, shapes, gradients=gradients, observer=observer)
            if recorder:
                recorder.finish()
                trace.add(recorder, schedule)
            found = {"embedding": embedding.main_grad}
            found |= {name: weight.grad for name, weight in zip(names, chunks, strict=True)}
            if not tied:
                found["output"] = output.main_grad
            found = {name: gradient if gradient is None else gradient.cpu() for name, gradient in found.items()}
            results.append((model.losses, found, in_flight))
        dist.barrier()
        return results


def _schedule(
    name: str,
    ranks: int,
    microbatches: int,
    method: str,
    gradients: bool,
    vocab_ranks: tuple[int, ...] | None = None,
    offload_chunks: int = 0,
) -> Schedule:
    schedule = generate(
        name,
        ranks,
        microbatches,
        vocab=VocabMethod(method),
        vocab_ranks=vocab_ranks,
        offload_chunks=offload_chunks if gradients else 0,
        overlapped=gradients and not offload_chunks and family(name).has_pairs,
    )
    return schedule if gradients else schedule.forward_only()
