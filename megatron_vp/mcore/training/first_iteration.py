"""Rehearses the pipeline before the first iteration, and logs host memory allocated for offloading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from megatron.training.utils import print_rank_0

from megatron_vp.runtime.host_memory import HostMemory
from megatron_vp.runtime.iteration import LayerShards
from megatron_vp.runtime.model import Shapes
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.passes import Schedule

GIB = 2**30

Programs = Callable[[int, bool, Shapes], tuple[Schedule, tuple[Program, ...]]]
"""A function that returns the schedule and the programs of all ranks, given the number of microbatches, whether
gradients are computed, and the sizes of a microbatch.
"""


def rehearse(
    pipeline: Pipeline,
    programs: Programs,
    microbatches: int,
    layer_shards: LayerShards | None,
    shapes: Shapes,
    gradients: bool,
) -> None:
    """Call `Pipeline.rehearse` for a training iteration (`gradients`) or an evaluation with these shapes, unless it has
    been rehearsed already. For a training iteration, also rehearse an evaluation.

    Evaluations with other shapes are rehearsed when they begin. All ranks of the pipeline must call this function.
    """
    kinds = [(shapes, gradients)]
    if gradients:
        # Evaluation predicts only the next token, even if training predicts further tokens.
        kinds.append((replace(shapes, mtp_depth=0), False))
    new = [kind for kind in kinds if not pipeline.has_rehearsed(*kind)]
    if not new:
        return
    start = time.perf_counter()
    for sizes, trains in new:
        schedule, lowered = programs(microbatches, trains, sizes)
        pipeline.rehearse(schedule, lowered[pipeline.groups.rank], layer_shards, sizes, gradients=trains)
    if shapes.device.type == "cuda":
        torch.cuda.synchronize()
    words = " and ".join("training" if trains else "evaluation" for _, trains in new)
    print_rank_0(
        f"> rehearsed the pipeline for {words} in {time.perf_counter() - start:.2f} s: loaded the kernels of the "
        f"vocabulary layers and connected {pipeline.groups.communicators} communicators of this rank"
    )


@contextmanager
def saying_host_memory(memory: HostMemory) -> Iterator[None]:
    """Context for one iteration: on exit, log newly allocated host memory."""
    size, replaced, seconds = memory.bytes, memory.replaced, memory.seconds
    yield
    if memory.bytes > size:
        count = memory.replaced - replaced
        why = f", also to replace {count} slots, because microbatches save different amounts" if count else ""
        print_rank_0(
            f"> allocated {(memory.bytes - size) / GIB:.2f} GiB of host memory for this rank's activations in "
            f"{memory.seconds - seconds:.2f} s{why}"
        )
