"""Makes the schedule and the programs of an iteration, and caches them for later iterations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any
from unittest import mock

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import cuda_graphs

from megatron_vp.errors import UserError
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule
from megatron_vp.schedule.request import ScheduleRequest


@lru_cache(maxsize=8)
def programs(request: ScheduleRequest, mtp_stage: int | None) -> tuple[Schedule, tuple[Program, ...]]:
    """Return the schedule of an iteration and the programs of all pipeline ranks.

    The costs in the request decide the order of passes and the points at which the programs communicate.
    `mtp_stage` is explained in `lower`.
    """
    schedule = expand_interlaced(request.schedule())
    return schedule, lower(schedule, request.costs, mtp_stage)


def late_weights(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """Return the (chunk, microbatch) pairs for which the rank runs another F or B between B and W."""
    started: dict[tuple[int, int], int] = {}
    late, passes = set(), 0
    for step in schedule.ranks[rank]:
        which = (step.chunk, step.microbatch)
        if step.kind in (PassKind.F, PassKind.B, PassKind.BW):
            passes += 1
        if step.kind is PassKind.B:
            started[which] = passes
        if step.kind is PassKind.W and passes > started[which]:
            late.add(which)
    return frozenset(late)


def graph_order(schedule: Schedule, rank: int) -> list[int]:
    """Return the order of a rank's forwards and backwards: c + 1 stands for F of chunk c, -(c + 1) for its backward.

    The list does not name microbatches, so both the forwards and the backwards of a chunk must process microbatches in
    ascending order. Raises UserError if the schedule processes microbatches in another order.
    """
    signs = {PassKind.F: 1, PassKind.B: -1, PassKind.BW: -1}
    steps = [step for step in schedule.ranks[rank] if step.kind in signs]
    reached: dict[int, int] = {}
    for step in steps:
        way = signs[step.kind] * (step.chunk + 1)
        if step.microbatch != reached.get(way, 0):
            raise UserError(
                "--cuda-graph-impl transformer_engine needs the microbatches of each chunk in ascending order, but on "
                f"rank {rank} {step} comes before the same pass of microbatch {reached.get(way, 0)}: use "
                "--cuda-graph-impl none"
            )
        reached[way] = step.microbatch + 1
    return [signs[step.kind] * (step.chunk + 1) for step in steps]


def in_our_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `TECudaGraphHelper._get_cuda_graph_input_data` to use the order of the job's schedule.

    Megatron lets Transformer Engine capture a graph for every layer and microbatch, in a given order of forwards and
    backwards. Graphs share buffers according to this order: an F reuses the input buffer of a microbatch whose B came
    earlier. Megatron always gives the order of 1F1B, so under another schedule an F would overwrite data that a later B
    reads. Megatron's own graphs (`local`) need no change, because Megatron captures them in the order of the first
    iteration.
    """

    @wraps(original)
    def _get_cuda_graph_input_data(self: Any) -> Any:
        from megatron_vp.mcore.training.forward_backward import training_schedule

        sizes = get_num_microbatches(), self.seq_length, self.micro_batch_size
        order = graph_order(*training_schedule(self.model, self.pg_collection, *sizes))
        with mock.patch.object(cuda_graphs, "convert_schedule_table_to_order", lambda *_: order):
            return original(self)

    return _get_cuda_graph_input_data
