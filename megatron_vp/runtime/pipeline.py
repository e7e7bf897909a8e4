"""Runs an iteration's lowered program on one pipeline rank, with the rank's part of the model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.chunk_passes import ChunkPasses
from megatron_vp.runtime.collectives import VocabularyCollectives
from megatron_vp.runtime.groups import PipelineGroups, pipeline_device
from megatron_vp.runtime.host_memory import HostMemory
from megatron_vp.runtime.iteration import Iteration, LayerShards, Observer
from megatron_vp.runtime.links import Links
from megatron_vp.runtime.offload import Offload
from megatron_vp.runtime.progress import FINISHING, Progress
from megatron_vp.runtime.sharded_vocab_passes import ShardedVocabPasses
from megatron_vp.runtime.store import Store
from megatron_vp.runtime.streams import CudaEvent, CudaIterations, Stream, second_stream
from megatron_vp.schedule.instructions import Load, Loss, Post, Program, Run, RunPair, Wait
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.transfers import Collective, Copy, Message, Operation


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
        observer: Observer = nullcontext,
    ) -> float:
        """Run one iteration. `Iteration` describes the arguments.

        Returns:
            The largest number of microbatches whose activations were held at once. They count as 1/v for each of the
            rank's v chunks.
        """
        store = Store()
        marks_device = shapes.device.type == "cuda"
        iteration = Iteration(self.groups, schedule, program, store, shapes, model, layer_shards, gradients, observer)
        # A runner's `post` starts an operation of one kind, and returns the function that completes the operation; its
        # `finish` makes later work wait for the rest.
        runners: dict[type, Any] = {}
        offload = self._offload(iteration)
        if layer_shards is None:
            chunks = ChunkPasses(iteration, offload)
        else:
            chunks = ShardedVocabPasses(iteration, layer_shards, offload)
            runners[Collective] = VocabularyCollectives(iteration, layer_shards, self._stream)
        if offload is not None:
            runners[Copy] = offload
        runners[Message] = Links(iteration)
        passes = chunks.handlers | (offload.handlers if offload else {})
        posted: dict[Operation, Any] = {}
        with self.progress.schedule():
            for instruction in program.instructions:
                self.progress.at(instruction)
                with observer(instruction):
                    match instruction:
                        case Run(action):
                            passes[action.kind](action.microbatch, action.chunk)
                        case RunPair(forward, backward):
                            chunks.run_pair(forward, backward)
                        case Load(microbatch):
                            chunks.load(microbatch)
                        case Loss(microbatch):
                            chunks.loss(microbatch)
                        case Post(operation):
                            posted[operation] = runners[type(operation)].post(operation)
                        case Wait(operation):
                            posted.pop(operation)()
                            if marks_device:
                                self.progress.mark(instruction, CudaEvent())
            self.progress.at(FINISHING)
            for runner in runners.values():
                runner.finish()
        left = [str(operation) for operation, complete in posted.items() if complete]
        assert not left, f"operations were posted but never awaited: {left}"
        store.assert_empty()
        if gradients:
            store.assert_peaks(program.peaks)
        return store.held[Held.ACTIVATIONS].peak / schedule.chunks

    def _offload(self, iteration: Iteration) -> Offload | None:
        """Create the `Offload` of this rank's chunks; return None if none is offloaded."""
        chunks = {chunk for rank, chunk in iteration.schedule.offloaded if rank == self.groups.rank}
        if not chunks:
            return None
        self._copies = self._copies or second_stream(iteration.shapes.device, alone=self.groups.alone)
        return Offload(iteration, self._copies, self.host_memory, chunks)
