"""Runs an iteration's lowered program on one pipeline rank, with the rank's part of the model."""

from __future__ import annotations

from typing import Any

from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.chunk_passes import ChunkPasses
from megatron_vp.runtime.collectives import VocabularyCollectives
from megatron_vp.runtime.executor import Observer, execute, unobserved
from megatron_vp.runtime.groups import PipelineGroups, pipeline_device
from megatron_vp.runtime.host_memory import HostMemory, slots_by_chunk
from megatron_vp.runtime.iteration import Iteration, LayerShards
from megatron_vp.runtime.links import Links
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.progress import FINISHING, Progress
from megatron_vp.runtime.sharded_vocab_passes import ShardedVocabPasses
from megatron_vp.runtime.store import Store
from megatron_vp.runtime.streams import CudaEvent, CudaIterations, Stream, second_stream
from megatron_vp.schedule.instructions import Load, Loss, Post, Program, Run, Wait
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.transfers import Collective, Copy, Message


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

    def run(
        self,
        schedule: Schedule,
        program: Program,
        model: Any,
        layer_shards: LayerShards | None,
        shapes: Shapes,
        *,
        gradients: bool,
        observer: Observer = unobserved,
    ) -> tuple[float, int]:
        """Run one iteration. `Iteration` describes the arguments.

        Returns:
            The largest numbers of microbatches that were held at once, with activations and with logits. Activations
            count as 1/v for each of the rank's v chunks. Logits are held between S and T (`PendingOutput`).
        """
        store = Store()
        marks_device = shapes.device.type == "cuda"
        iteration = Iteration(self.groups, schedule, program, store, shapes, model, layer_shards, gradients, observer)
        offload = self._offload(iteration)
        # A runner starts (`post`) and awaits (`wait`) one kind of operation; `finish` makes later work wait for the
        # rest.
        runners: dict[type, Any] = {}
        if layer_shards is None:
            chunks = ChunkPasses(iteration, offload)
        else:
            chunks = ShardedVocabPasses(iteration, layer_shards, offload)
            runners[Collective] = VocabularyCollectives(iteration, layer_shards, self._stream)
        if offload is not None:
            runners[Copy] = offload
        runners[Message] = Links(iteration)
        passes = chunks.handlers | (offload.handlers if offload else {})

        def run(instruction: Run) -> None:
            action = instruction.action
            passes[action.kind](action.microbatch, action.chunk)

        def wait(instruction: Wait) -> None:
            runners[type(instruction.operation)].wait(instruction.operation)
            if marks_device:
                self.progress.mark(instruction, CudaEvent())

        handlers = {
            Load: lambda instruction: chunks.load(instruction.microbatch),
            Run: run,
            Loss: lambda instruction: chunks.loss(instruction.microbatch),
            Post: lambda instruction: runners[type(instruction.operation)].post(instruction.operation),
            Wait: wait,
        }
        with self.progress.schedule():
            execute(program, handlers, observer, self.progress)
            self.progress.at(FINISHING)
            for runner in runners.values():
                runner.finish()
        store.assert_empty()
        if gradients:
            store.assert_peaks(program.peaks)
        return store.held[Held.ACTIVATIONS].peak / schedule.chunks, store.held[Held.LOGITS].peak

    def _offload(self, iteration: Iteration) -> Offload | None:
        """Create the `Offload` of a program with copies to the host; return None for other programs."""
        slots = slots_by_chunk(iteration.program.instructions)
        if not slots:
            return None
        self._copies = self._copies or second_stream(iteration.shapes.device, alone=self.groups.alone)
        self.host_memory.expect(slots)
        return Offload(iteration, self._copies, self.host_memory, slots)
