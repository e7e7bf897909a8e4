"""Runs an iteration's lowered program on one pipeline rank, with the rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_vp.runtime.chunk_passes import ChunkPasses
from megatron_vp.runtime.collectives import VocabularyCollectives
from megatron_vp.runtime.executor import Observer, Unobserved, execute
from megatron_vp.runtime.groups import PipelineGroups, pipeline_device
from megatron_vp.runtime.host_memory import HostMemory, slots_by_chunk
from megatron_vp.runtime.iteration import Iteration, LayerShards
from megatron_vp.runtime.links import Links
from megatron_vp.runtime.model import Model, Shapes
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.progress import FINISHING, Progress
from megatron_vp.runtime.rehearsal import RehearsalModel
from megatron_vp.runtime.sharded_vocab_layers import ShardedVocabLayers
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.runtime.streams import CudaIterations, CudaMark, Stream, second_stream
from megatron_vp.runtime.whole_vocab_layers import WholeVocabLayers
from megatron_vp.schedule.instructions import Load, Loss, Post, Program, Run, Wait
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.transfers import Channel, Collective, Copy, Message

_CONTENT: dict[Channel, tuple[Slot, Callable[[Shapes, int], torch.Tensor]]] = {
    Channel.ACTIVATION: (Slot.ACTIVATION, lambda shapes, stage: shapes.activation(stage)),
    Channel.GRADIENT: (Slot.GRADIENT, lambda shapes, stage: shapes.activation(stage + 1)),
    Channel.LABELS: (Slot.LABELS, lambda shapes, _: shapes.token_ids()),
    Channel.TOKEN_LOSS: (Slot.TOKEN_LOSS, lambda shapes, _: shapes.token_values()),
    Channel.TOKEN_GRADIENT: (Slot.TOKEN_GRADIENT, lambda shapes, _: shapes.token_values()),
}
"""For each channel: the store's slot for a message's tensor, and the function that allocates the receive buffer of a
stage.
"""


class Runner(Protocol):
    """Interface of an object that runs a rank's operations of one kind during one iteration."""

    def post(self, operation: Any) -> None:
        """Start this rank's part of the operation."""

    def wait(self, operation: Any) -> None:
        """Make later passes wait for the operation, and put the operation's result into the store."""

    def finish(self) -> None:
        """End the iteration: make later work wait for everything that was posted."""


class _Messages:
    """Sends tensors from the store, and puts received tensors into it."""

    def __init__(self, iteration: Iteration) -> None:
        self._rank, self._store, self._shapes = iteration.rank, iteration.store, iteration.shapes
        self._links = Links(iteration.groups)
        self.finish = self._links.finish

    def post(self, message: Message) -> None:
        slot, buffer = _CONTENT[message.channel]
        if message.source != self._rank:
            self._links.receive(message, buffer(self._shapes, message.target_stage))
        else:
            self._links.send(message, self._store.take(slot, message.microbatch, at=message.target_stage))

    def wait(self, message: Message) -> None:
        slot, _ = _CONTENT[message.channel]
        self._store.put(slot, message.microbatch, self._links.wait(message), at=message.target_stage)


@dataclass(frozen=True)
class Report:
    """Peak numbers of microbatches on one rank in one iteration."""

    peak_in_flight: float
    """Largest number of microbatches whose activations were held at once. A microbatch counts as 1/v for each of the
    rank's v chunks that holds its activations.
    """
    peak_logits_in_flight: int
    """Largest number of microbatches between S and T at once; their E and X (`PendingOutput`) are in memory."""


class Pipeline:
    """A pipeline rank with its communicators and its second stream; lives as long as the training job."""

    def __init__(self, groups: PipelineGroups) -> None:
        self.groups = groups
        device = pipeline_device()
        finished = CudaIterations(device) if device.type == "cuda" else None
        self.progress = Progress(groups.members, groups.rank, finished)
        self._stream = second_stream(device, alone=groups.alone)
        self._copies: Stream | None = None
        self.host_memory = HostMemory(pins=device.type == "cuda")
        self._rehearsed: set[tuple[Shapes, bool]] = set()

    def rehearse(
        self,
        schedule: Schedule,
        program: Program,
        layer_shards: LayerShards | None,
        shapes: Shapes,
        *,
        gradients: bool,
    ) -> None:
        """Run an iteration without a transformer, to load kernels, connect ranks and allocate buffers in advance.

        Weights and their `main_grad` do not change. All ranks of the pipeline must call this method together, with a
        schedule of `rehearsal.MICROBATCHES` microbatches.
        """
        shards = layer_shards.shards if layer_shards else None
        first_tokens = [shards.start(index) for index in range(shards.count) if shards.rows(index)] if shards else [0]
        model = RehearsalModel(
            shapes, schedule.placement, self.groups.rank, first_tokens, shards is not None, gradients
        )
        self.run(schedule, program, model, layer_shards, shapes, gradients=gradients, rehearsal=True)
        self._rehearsed.add((shapes, gradients))

    def has_rehearsed(self, shapes: Shapes, gradients: bool) -> bool:
        """Whether an iteration with these `shapes` and this value of `gradients` has been rehearsed."""
        return (shapes, gradients) in self._rehearsed

    def run(
        self,
        schedule: Schedule,
        program: Program,
        model: Model,
        layer_shards: LayerShards | None,
        shapes: Shapes,
        *,
        gradients: bool,
        observer: Observer | None = None,
        rehearsal: bool = False,
    ) -> Report:
        """Run one iteration. `Iteration` describes the arguments; a `rehearsal` does not count as an iteration of the
        job.
        """
        observer, store = observer or Unobserved(), Store()
        marks_device = shapes.device.type == "cuda"
        iteration = Iteration(
            self.groups, schedule, program, store, shapes, model, layer_shards, gradients, observer, self.progress
        )
        vocab_layers: WholeVocabLayers | ShardedVocabLayers
        runners: dict[type, Runner] = {}
        if layer_shards is None:
            vocab_layers = WholeVocabLayers(iteration)
        else:
            vocab_layers = ShardedVocabLayers(iteration, layer_shards)
            runners[Collective] = VocabularyCollectives(iteration, layer_shards, self._stream)
        offload = self._offload(iteration, rehearsal)
        if offload is not None:
            runners[Copy] = offload
        chunks = ChunkPasses(iteration, vocab_layers, offload)
        passes = chunks.handlers | vocab_layers.handlers | (offload.handlers if offload else {})
        runners[Message] = _Messages(iteration)

        def run(instruction: Run) -> None:
            action = instruction.action
            passes[action.kind](action.microbatch, action.chunk)

        def post(instruction: Post) -> None:
            runners[type(instruction.operation)].post(instruction.operation)

        def wait(instruction: Wait) -> None:
            runners[type(instruction.operation)].wait(instruction.operation)
            if marks_device:
                self.progress.mark(instruction, CudaMark())

        handlers = {
            Load: lambda instruction: vocab_layers.load(instruction.microbatch),
            Run: run,
            Loss: lambda instruction: vocab_layers.loss(instruction.microbatch),
            Post: post,
            Wait: wait,
        }
        with self.progress.schedule(rehearsal):
            execute(program, handlers, observer, self.progress)
            self.progress.at(FINISHING)
            for runner in runners.values():
                runner.finish()
        store.assert_empty()
        if gradients:
            store.assert_peaks(program.peaks)
        return Report(store.held[Held.ACTIVATIONS].peak / schedule.chunks, store.held[Held.LOGITS].peak)

    def _offload(self, iteration: Iteration, rehearsal: bool) -> Offload | None:
        """Create the `Offload` of a program with copies to the host; return None for other programs.

        A rehearsal uses separate host memory, because its tensors are too small to show how large a slot must be.
        """
        slots, device = slots_by_chunk(iteration.program.instructions), iteration.shapes.device
        if not slots:
            return None
        self._copies = self._copies or second_stream(device, alone=self.groups.alone)
        memory = HostMemory(pins=False) if rehearsal else self.host_memory
        memory.expect(slots)
        return Offload(iteration.store, self._copies, memory, device, slots, iteration.observer)
