"""Describes one iteration on one rank, for the parts of the runtime that run it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.store import Store
from megatron_vp.schedule.instructions import Instruction, Program
from megatron_vp.schedule.passes import Schedule
from megatron_vp.schedule.transfers import Operation
from megatron_vp.vocab.embedding import EmbeddingLayer
from megatron_vp.vocab.loss import CROSS_ENTROPY, TokenLoss
from megatron_vp.vocab.output import OutputLayer
from megatron_vp.vocab.shards import VocabShards

Handler = Callable[[int, int], None]
"""Function that runs a pass, given the microbatch and the chunk."""
Observer = Callable[[Instruction | Operation], AbstractContextManager[Any]]
"""Returns a context manager around an instruction or an operation: a recorder's `span`, or `nullcontext`. The context
of an operation is entered on the operation's stream or, on CPU, in its thread.
"""


@dataclass(frozen=True)
class LayerShards:
    """The token loss, and this rank's shards of the vocabulary layers (None on a rank without vocabulary rows).

    Tied layers share one weight.
    """

    shards: VocabShards
    embedding: EmbeddingLayer | None
    output: OutputLayer | None
    loss: TokenLoss = CROSS_ENTROPY

    @property
    def holds_rows(self) -> bool:
        """Whether this rank holds vocabulary rows, and so runs the vocabulary passes."""
        return self.output is not None


@dataclass(frozen=True)
class Iteration:
    """What the parts of the runtime share in one iteration.

    schedule, program: the schedule, and this rank's program, which was lowered from it.
    shapes: sizes of a microbatch, equal on all ranks.
    model: the chunks of one rank with the user's data and loss function; `megatron_vp.mcore.training.megatron_model`
        describes the methods that a model has.
    layer_shards: vocabulary shards of this rank; None for a schedule without vocabulary passes.
    gradients: False for evaluation, whose schedule contains only forward passes.
    """

    groups: PipelineGroups
    schedule: Schedule
    program: Program
    store: Store
    shapes: Shapes
    model: Any
    layer_shards: LayerShards | None
    gradients: bool
    observer: Observer
