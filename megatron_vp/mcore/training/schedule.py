"""The function that Megatron's training loop calls in place of its own pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.surgery import PIPELINE_ATTRIBUTE, vocabulary_layers
from megatron_vp.mcore.reports.pipeline_trace import pipeline_trace
from megatron_vp.mcore.reports.rank_report import rank_report
from megatron_vp.mcore.training.deferred_checks import checks_put_off
from megatron_vp.mcore.training.driver import MegatronModel
from megatron_vp.mcore.training.first_iteration import rehearse
from megatron_vp.mcore.training.pass_costs import pass_costs
from megatron_vp.runtime.groups import pipeline_device
from megatron_vp.runtime.made_up import MadeUpShapes
from megatron_vp.runtime.model import Shapes
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.recorder import Recorder
from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.expand_interlaced import expand_interlaced
from megatron_vp.schedule.families import family
from megatron_vp.schedule.instructions import Program
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import PassKind, Schedule, VocabMethod
from megatron_vp.schedule.reorder import evaluation


@checks_put_off()
def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any]],
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run one iteration under --pipeline-schedule; Megatron's contract for a `forward_backward_func`.

    Returns:
        What the user's loss function reported, one entry a microbatch, on the last pipeline rank; empty elsewhere.

    Raises:
        UserError: for what this schedule cannot do.
    """
    if collect_non_loss_data:
        raise UserError("collecting non-loss data is not supported: leave --vocab-parallel and --pipeline-schedule out")
    if adjust_tensor_shapes_fn is not None:
        raise UserError(
            "adjusted tensor shapes (distillation) are not supported: leave --vocab-parallel and "
            "--pipeline-schedule out"
        )
    if p2p_communicator is not None:
        raise UserError(
            "a p2p_communicator of the script's own is not supported: every edge of the pipeline has a communicator of "
            "ours; leave --vocab-parallel and --pipeline-schedule out"
        )
    args = get_args()
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    cores = unwrap_model(chunks)
    pipeline: Pipeline | None = getattr(cores[0], PIPELINE_ATTRIBUTE, None)
    if pipeline is None:
        raise UserError(
            f"this script's {type(cores[0]).__name__} was made by a builder of its own, which --vocab-parallel and "
            f"--pipeline-schedule know nothing of: use Megatron's builder or a model_provider, or leave both out"
        )
    config = get_model_config(chunks[0])
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    sequence = seq_length // groups.cp.size()
    sizes = (sequence, micro_batch_size, config.hidden_size, config.params_dtype, pipeline_device())
    gradients = not forward_only
    heads = 1 + (args.mtp_num_layers or 0) if gradients and args.vocab_parallel else 1
    stretches = 2 if groups.cp.size() > 1 else 1  # of the whole sequence, one from its front, one from its end
    parts, part = (pipeline.groups.tensor_size, pipeline.groups.tensor_rank) if config.sequence_parallel else (1, 0)
    cut = {"heads": heads, "stretches": stretches, "parts": parts, "part": part}
    shapes = MadeUpShapes(*sizes, args.padded_vocab_size, **cut) if args.fake_process_group else Shapes(*sizes, **cut)

    method = VocabMethod(args.vocab_parallel_algorithm if args.vocab_parallel else VocabMethod.NONE)
    costs = pass_costs(args, method)
    layers = vocabulary_layers(cores)

    def programs(microbatches: int, gradients: bool, shapes: Shapes) -> tuple[Schedule, tuple[Program, ...]]:
        ranks = len(pipeline.groups.members)
        looks_ahead = shapes.heads > 1
        return _programs(
            args.pipeline_schedule, ranks, len(chunks), microbatches, method, costs, not gradients, looks_ahead
        )

    rehearse(pipeline, programs, layers, shapes, gradients)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    schedule, lowered = programs(num_microbatches, gradients, shapes)
    rank = pipeline.groups.rank
    megatron = MegatronModel(
        chunks,
        forward_step_func,
        iterators,
        num_microbatches,
        shapes,
        gradients,
        rank == 0,
        groups.cp,
        schedule.split_backward,
        late_weights(schedule, rank),
        first_val_step,
    )
    report, trace = (rank_report(), pipeline_trace(pipeline.groups)) if gradients else (None, None)
    if report:
        report.begin()
    recorder = Recorder(shapes.device) if report or trace else None
    counted = pipeline.run(
        schedule,
        lowered[rank],
        megatron,
        layers,
        shapes,
        gradients=gradients,
        observer=recorder,
    )
    if recorder:
        recorder.finish()
    if report:
        report.held(counted.peak_in_flight, counted.peak_between_s_and_t)
        report.add(recorder, model, num_microbatches)
    if trace:
        trace.add(recorder, schedule)
    megatron.finish()
    if gradients and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            chunks,
            megatron.tokens_seen if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )
    megatron.check_losses()
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return megatron.losses


@lru_cache(maxsize=8)
def _programs(
    name: str,
    pipeline_size: int,
    chunks: int,
    microbatches: int,
    method: VocabMethod,
    costs: PassCosts,
    forward_only: bool,
    looks_ahead: bool,
) -> tuple[Schedule, tuple[Program, ...]]:
    schedule = _schedule(name, pipeline_size, chunks, microbatches, method, costs)
    if forward_only:
        schedule = evaluation(schedule, costs)
    return schedule, lower(schedule, costs, looks_ahead)


@lru_cache(maxsize=8)
def _schedule(
    name: str, pipeline_size: int, chunks: int, microbatches: int, method: VocabMethod, costs: PassCosts
) -> Schedule:
    chosen = family(name)
    return expand_interlaced(chosen.schedule(pipeline_size, microbatches, chosen.method(method), chunks, costs))


def late_weights(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """The (chunk, microbatch) of a rank of which another F or B runs between B and W."""
    started: dict[tuple[int, int], int] = {}
    late, passes = set(), 0
    for step in schedule.ranks[rank]:
        which = (step.chunk, step.microbatch)
        if step.kind in (PassKind.F, PassKind.B):
            passes += 1
        if step.kind is PassKind.B:
            started[which] = passes
        if step.kind is PassKind.W and passes > started[which]:
            late.add(which)
    return frozenset(late)
