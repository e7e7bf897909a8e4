"""One pipeline rank: runs the lowered program of an iteration on a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vp.runtime.chunk_passes import ChunkPasses, VocabLayers
from megatron_vp.runtime.collectives import LayerShards, VocabularyCollectives
from megatron_vp.runtime.executor import Observer, Unobserved, execute
from megatron_vp.runtime.groups import PipelineGroups, pipeline_device
from megatron_vp.runtime.links import Links
from megatron_vp.runtime.model import Model, Shapes
from megatron_vp.runtime.progress import FINISHING, Progress
from megatron_vp.runtime.rehearsal import RehearsalModel
from megatron_vp.runtime.sharded_vocab_layers import ShardedVocabLayers
from megatron_vp.runtime.store import Slot, Store
from megatron_vp.runtime.streams import CudaIterations, CudaMark, second_stream
from megatron_vp.runtime.whole_vocab_layers import WholeVocabLayers
from megatron_vp.schedule.instructions import Channel, Collective, Load, Loss, Post, Program, Run, Wait
from megatron_vp.schedule.passes import Schedule

_CONTENT = {
    Channel.ACTIVATION: Slot.ACTIVATION,
    Channel.GRADIENT: Slot.GRADIENT,
    Channel.LABELS: Slot.LABELS,
    Channel.TOKEN_LOSS: Slot.TOKEN_LOSS,
    Channel.TOKEN_GRADIENT: Slot.TOKEN_GRADIENT,
}
"""What a message carries: a post takes it from the store of the sender, a wait puts it into that of the receiver."""


@dataclass(frozen=True)
class Report:
    """What the runtime counted in one iteration of one rank."""

    peak_in_flight: float
    """Most microbatches of a whole rank whose activations were held at once."""
    peak_logits_in_flight: int
    """Most microbatches whose E and X were held at once."""


class Pipeline:
    """A pipeline rank with its communicators and its second stream; lives as long as the training job."""

    def __init__(self, groups: PipelineGroups) -> None:
        self.groups = groups
        device = pipeline_device()
        finished = CudaIterations(device) if device.type == "cuda" else None
        self.progress = Progress(groups.members, groups.rank, finished)
        self._stream = second_stream(device, alone=groups.alone)
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
        """Run an iteration without a transformer: it loads kernels, connects ranks and allocates what others will use.

        No weight and no `main_grad` changes. All ranks of the pipeline must call it together. The arguments are those
        of `run`; `schedule` has `rehearsal.MICROBATCHES` microbatches.
        """
        shards = layer_shards.shards if layer_shards else None
        first_tokens = [shards.start(index) for index in range(shards.count) if shards.rows(index)] if shards else [0]
        model = RehearsalModel(
            shapes, schedule.placement, self.groups.rank, first_tokens, shards is not None, gradients
        )
        self.run(schedule, program, model, layer_shards, shapes, gradients=gradients, rehearsal=True)
        self._rehearsed.add((shapes, gradients))

    def has_rehearsed(self, shapes: Shapes, gradients: bool) -> bool:
        """Whether an iteration of this kind and these sizes has been rehearsed."""
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
        """Run one iteration.

        Args:
            schedule: the schedule that `program` was lowered from.
            program: of this rank.
            model: transformer part, data and loss function of this rank.
            layer_shards: vocabulary shards of this rank; None for a schedule without vocabulary passes.
            shapes: sizes of a microbatch, equal on all ranks.
            gradients: False for evaluation, whose schedule holds forward passes only.
            observer: watches the instructions and the collectives.
            rehearsal: whether the iteration is none of the job's.
        """
        placement, rank = schedule.placement, self.groups.rank
        observer = observer or Unobserved()
        marks_device = shapes.device.type == "cuda"
        store, links = Store(), Links(self.groups)
        vocab_layers: VocabLayers
        collectives = None
        if layer_shards is None:
            vocab_layers = WholeVocabLayers(store, model, placement, rank)
        else:
            vocab_layers = ShardedVocabLayers(
                store,
                shapes,
                layer_shards,
                model,
                schedule.vocab,
                schedule.microbatches,
                gradients,
                reads_tokens=rank == 0,
                reads_labels=rank == placement.ranks - 1,
            )
            collectives = VocabularyCollectives(
                self.groups,
                self._stream,
                store,
                shapes,
                layer_shards,
                schedule.vocab,
                gradients,
                placement.first_rank,
                placement.last_rank,
                schedule.microbatches,
                awaited=_awaited_collectives(program.instructions),
                observer=observer,
                progress=self.progress,
            )
        chunks = ChunkPasses(store, model, vocab_layers, rank, placement, gradients, schedule.split_backward)
        passes = chunks.handlers | vocab_layers.handlers
        buffers = {
            Channel.ACTIVATION: shapes.activation,
            Channel.GRADIENT: shapes.activation,
            Channel.LABELS: shapes.token_ids,
            Channel.TOKEN_LOSS: shapes.token_values,
            Channel.TOKEN_GRADIENT: shapes.token_values,
        }

        def run(instruction: Run) -> None:
            action = instruction.action
            passes[action.kind](action.microbatch, action.chunk)

        def post(instruction: Post) -> None:
            operation = instruction.operation
            if isinstance(operation, Collective):
                assert collectives is not None
                collectives.post(operation)
            elif operation.source != rank:
                links.receive(operation, buffers[operation.channel]())
            else:
                slot = _CONTENT[operation.channel]
                links.send(operation, store.take(slot, operation.microbatch, at=operation.target_stage))

        def wait(instruction: Wait) -> None:
            operation = instruction.operation
            if isinstance(operation, Collective):
                assert collectives is not None
                collectives.wait(operation)
            else:
                slot, received = _CONTENT[operation.channel], links.wait(operation)
                store.put(slot, operation.microbatch, received, at=operation.target_stage)
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
            if collectives is not None:
                collectives.finish()
            links.finish()
        store.assert_empty()
        return Report(chunks.in_flight.peak / schedule.chunks, vocab_layers.logits_in_flight.peak)


def _awaited_collectives(instructions: Sequence[object]) -> frozenset[Collective]:
    return frozenset(
        instruction.operation
        for instruction in instructions
        if isinstance(instruction, Wait) and isinstance(instruction.operation, Collective)
    )
