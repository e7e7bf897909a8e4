"""CUDA graphs of layers (`--cuda-graph-impl transformer_engine` and `local`) under our schedules.

Megatron has Transformer Engine capture a graph for every layer and microbatch, in the order in which a rank runs its
forwards and backwards. Graphs share buffers by that order: an F takes the input buffer of a microbatch whose B came
before. Megatron hands over the order of its own 1F1B, so under another schedule an F would overwrite what a later B
reads. Here it is the order of the job's schedule.

Megatron's own graphs (`local`) are captured in the order that it has recorded in the first iteration, so there is
nothing to hand over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import cuda_graphs

from megatron_vp.errors import UserError
from megatron_vp.schedule.passes import PassKind, Schedule


def graph_order(schedule: Schedule, rank: int) -> list[int]:
    """The forwards and backwards of a rank in order: c + 1 is F of chunk c, -(c + 1) its backward.

    Microbatches are not named: a chunk's are assumed to come in the same order in both directions. Raises UserError for
    a schedule in which they do not.
    """
    signs = {PassKind.F: 1, PassKind.B: -1, PassKind.BW: -1}
    steps = [step for step in schedule.ranks[rank] if step.kind in signs]
    reached: dict[int, int] = {}
    for step in steps:
        way = signs[step.kind] * (step.chunk + 1)
        if step.microbatch != reached.get(way, 0):
            raise UserError(
                f"--cuda-graph-impl transformer_engine replays the microbatches of a chunk in order, and on rank "
                f"{rank} {step} comes before that of microbatch {reached.get(way, 0)}: use --cuda-graph-impl none"
            )
        reached[way] = step.microbatch + 1
    return [signs[step.kind] * (step.chunk + 1) for step in steps]


def in_our_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `TECudaGraphHelper._get_cuda_graph_input_data`, with the job's order in place of its own."""

    @functools.wraps(original)
    def _get_cuda_graph_input_data(self: Any) -> Any:
        from megatron_vp.mcore.training.forward_backward import training_schedule

        sizes = get_num_microbatches(), self.seq_length, self.micro_batch_size
        order = graph_order(*training_schedule(self.model, self.pg_collection, *sizes))
        with mock.patch.object(cuda_graphs, "convert_schedule_table_to_order", lambda *_: order):
            return original(self)

    return _get_cuda_graph_input_data
