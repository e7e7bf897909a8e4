"""Provides the function that Megatron's training loop calls instead of its own pipeline schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, wraps
from itertools import chain, count
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer import cuda_graphs
from megatron.core.utils import get_model_config, unwrap_model

from megatron_vp.errors import UserError
from megatron_vp.jobs.layout_text import stages_behind_mtp
from megatron_vp.mcore.model.preparation import RankModel, prepare
from megatron_vp.mcore.reports.watch import watch
from megatron_vp.mcore.settled import is_plain
from megatron_vp.mcore.training.loss_check import deferred_checks
from megatron_vp.mcore.training.megatron_model import MegatronModel
from megatron_vp.mcore.training.module_offload import offloading
from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.groups import from_all, pipeline_device
from megatron_vp.runtime.iteration import LayerShards
from megatron_vp.runtime.progress import AGREEING
from megatron_vp.schedule.instructions import Load, Program
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.request import ScheduleRequest
from megatron_vp.vocab.loss import TokenLoss


@deferred_checks()
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
    """Run one iteration under --pipeline-schedule. The arguments are those of Megatron's `forward_backward_func`. Our
    schedules have their own communicators, so `p2p_communicator` is ignored.

    Returns:
        On the last pipeline rank, a list of the reports of the user's loss function, one per microbatch; on other
        ranks, an empty list.

    Raises:
        UserError: if our schedules do not support an argument.
    """
    gradients = not forward_only
    if adjust_tensor_shapes_fn is not None or (collect_non_loss_data and gradients):
        given = "collect_non_loss_data without forward_only" if collect_non_loss_data else "adjust_tensor_shapes_fn"
        raise UserError(f"{given} is not supported by our schedules: {_LEAVE_OUT}")
    chunks = model if isinstance(model, list) else [model]
    built = _model(chunks, gradients)
    shards, pipeline, config = built.layer_shards(), built.pipeline, get_model_config(chunks[0])
    groups = pg_collection or built.groups
    sizes = groups.cp.size(), seq_length, micro_batch_size
    shapes, schedule, lowered = _planned(built, num_microbatches, *sizes, gradients=gradients)
    timers, rank = config.timers, pipeline.groups.rank
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    megatron = MegatronModel(
        chunks,
        forward_step_func,
        data_iterator if isinstance(data_iterator, list) else [data_iterator],
        schedule,
        rank,
        shapes,
        gradients,
        groups.cp,
        first_val_step,
        collect_non_loss_data,
    )
    # Options such as --rank-report time the passes and the communication of training iterations.
    watched = watch(built.job, pipeline.groups.pipeline) if gradients else None
    observer = watched.recorder.span if watched else nullcontext
    try:
        with pipeline.progress.schedule(begins=False):
            shards, shapes = _settled(built, megatron, schedule, shards, shapes)
        with offloading(built, schedule, gradients, observer) as observer:
            in_flight = pipeline.run(
                schedule, lowered[rank], megatron, shards, shapes, gradients=gradients, observer=observer
            )
    finally:
        megatron.abandon()
    if watched:
        watched.finish(chunks, schedule, in_flight)
    megatron.finish()
    if gradients and config.finalize_model_grads_func is not None:
        # Megatron finalizes the gradients with its own reductions, as at the end of its schedules.
        config.finalize_model_grads_func(
            chunks,
            megatron.tokens_seen if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )
    if config.cuda_graph_impl == "local":
        # Megatron captures its graphs after the first iteration, in the order in which that iteration ran the passes.
        cuda_graphs.create_cudagraphs()
    if timers is not None:
        timers("forward-backward").stop()
    return megatron.losses


def running(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Replace one of Megatron's schedules, except for models that were built inside `Handle.plain_models`."""

    @wraps(original)
    def run(*, model: torch.nn.Module | list[torch.nn.Module], **given: Any) -> list[Any]:
        return (original if is_plain(model) else forward_backward)(model=model, **given)

    return run


_LEAVE_OUT = "leave --vocab-parallel and --pipeline-schedule out"


def _model(chunks: list[torch.nn.Module], gradients: bool) -> RankModel:
    """Check this rank's chunks, and return their model. A model that nothing has wrapped is prepared here."""
    for each in chunks if gradients else ():
        if any(weight.requires_grad and not hasattr(weight, "main_grad") for weight in each.parameters()):
            raise UserError(
                f"this script trains a {type(each).__name__} that it did not wrap in Megatron's "
                "DistributedDataParallel, but our passes write gradients to the wrapper's buffers: wrap the model in "
                "DistributedDataParallel, even without data parallelism, and shard optimizer states with the "
                "distributed optimizer"
            )
    built = prepare(chunks)
    if built is None or built.pipeline is None:
        raise UserError(
            f"this script's {type(unwrap_model(chunks[0])).__name__} was built before megatron_vp.enable was called, "
            "or by a custom builder, which our schedules do not support: call enable first, and use Megatron's "
            f"builder, a model_provider or GPTModel, or {_LEAVE_OUT}"
        )
    return built


def _settled(
    built: RankModel, megatron: MegatronModel, schedule: Schedule, shards: LayerShards | None, shapes: Shapes
) -> tuple[LayerShards | None, Shapes]:
    """Agree with the other ranks on what `forward_step` asks for in this iteration, and on the passes' data for it.
    Raises UserError, on all ranks, if ranks ask for different things, or for something that is not supported.
    """
    progress, groups, args = built.pipeline.progress, built.pipeline.groups, built.job.arguments
    progress.at(Load(0))
    own, sizes, failure = None, [], ""
    try:
        own, sizes = megatron.asks_for()
    except UserError as error:
        failure = str(error)
    progress.at(AGREEING)
    every, ranks = [(own, sizes, failure)], [dist.get_rank()]
    if not groups.alone:
        group = groups.host or built.groups.mp
        every, ranks = from_all(every[0], group), dist.get_process_group_ranks(group)
    if failure:
        raise UserError(failure)
    for rank, (*_, other) in zip(ranks, every, strict=True):
        if other:
            raise UserError(f"rank {rank}: {other}")
    request, table, last_stage = every[-1][0], every[0][1], len(every) - groups.tensor_size
    for index, (rank, (asked, found, _)) in enumerate(zip(ranks, every, strict=True)):
        # Scripts may ask on the last ranks of the pipeline alone, where the loss function runs.
        if asked != request and (asked is not None or index >= last_stage):
            raise UserError(
                f"rank {rank} asks for {asked or 'token losses'}, but rank {ranks[-1]}, where the loss function runs, "
                f"asks for {request or 'token losses'}: pass the model the same output_processor_context on all ranks"
            )
        for microbatch, (size, expected) in enumerate(zip(found, table, strict=True)):
            if expected is None or size not in (None, expected) or expected[1] % shapes.sp_size:
                raise UserError(
                    f"microbatch {microbatch} has the shape {size} on rank {rank}, but {expected} on rank {ranks[0]}: "
                    f"with variable_seq_lengths, give all ranks of a model the same microbatches, rank "
                    f"{ranks[0]} with input_ids, of lengths that {shapes.sp_size} sequence-parallel ranks divide"
                )
    if table:
        shapes = replace(shapes, sizes=tuple(table))
        if shapes.mtp_stage is not None:
            raise UserError("variable_seq_lengths is not supported with --mtp-num-layers: leave one of them out")
    megatron.agree(request, shapes)
    if request is None:
        return shards, shapes
    for option in ("mtp_num_layers", "vocab_label_smoothing", "vocab_z_loss"):
        if getattr(args, option):
            raise UserError(
                f"--{option.replace('_', '-')} changes the loss, so it is not supported with "
                "megatron_vp.token_log_probs: leave it out"
            )
    if shards is None:
        return None, replace(shapes, values=1 + request.entropy)
    if request.entropy_gradient and schedule.vocab is not VocabMethod.VOCAB_1:
        raise UserError(
            f"a loss that depends on the entropy is not supported by {schedule.vocab}, which reduces the input "
            "gradient before it knows the entropy: use --vocab-parallel-algorithm vocab-1, or entropy_gradient=False"
        )
    return replace(shards, loss=TokenLoss(**vars(request))), replace(shapes, values=1 + bool(request.entropy_gradient))


def _planned(
    built: RankModel, microbatches: int, context: int, seq_length: int, micro_batch_size: int, *, gradients: bool
) -> tuple[Shapes, Schedule, tuple[Program, ...]]:
    """Return the shapes of an iteration, its schedule, and the programs of all pipeline ranks. `context` is the number
    of context-parallel ranks.
    """
    job, chunks = built.job, len(built.chunks)
    args, config, own = job.arguments, built.chunks[0].config, built.pipeline.groups
    heads = args.mtp_num_layers or 0
    behind = stages_behind_mtp(args.pipeline_model_parallel_layout or "")
    sequence, batch = seq_length // context, micro_batch_size
    if args.sft or args.dataloader_inter_document_masking:  # Megatron joins a microbatch's sequences into one.
        sequence, batch = sequence * batch, 1
    shapes = Shapes(
        sequence,
        batch,
        config.hidden_size,
        config.params_dtype,
        pipeline_device(),
        # Our passes handle multi-token prediction only in training with --vocab-parallel.
        mtp_depth=heads if gradients and args.vocab_parallel else 0,
        mtp_stage=job.placement.stages - 1 - behind if heads else None,
        unsharded_mtp_depth=0 if args.vocab_parallel else heads,
        # With context parallelism, each rank has two pieces of the sequence, one from each half.
        cp_chunks=2 if context > 1 else 1,
        sp_size=own.tensor_size if config.sequence_parallel else 1,
        sp_rank=own.tensor_rank if config.sequence_parallel else 0,
        random_vocab=args.padded_vocab_size if args.fake_process_group else 0,
    )
    request = ScheduleRequest.of(
        job.settings.family,
        len(own.members),
        microbatches,
        method=job.settings.family.method(job.method),
        chunks=chunks,
        costs=job.order,
        vocab_ranks=built.rows.holders if built.rows else None,
        forward_only=not gradients,
        offload_chunks=job.settings.offload_chunks(chunks),
        overlapped=gradients and config.overlap_moe_expert_parallel_comm,
    )
    return shapes, *programs(request, shapes.words_stage)


@lru_cache(maxsize=8)
def programs(request: ScheduleRequest, mtp_stage: int | None) -> tuple[Schedule, tuple[Program, ...]]:
    """Return the schedule of an iteration and the programs of all pipeline ranks.

    The costs in the request decide the order of passes and the points at which the programs communicate.
    `mtp_stage` is explained in `lower`.
    """
    schedule = expand_interlaced(request.schedule())
    return schedule, lower(schedule, request.costs, mtp_stage)


def graph_order(schedule: Schedule, rank: int) -> list[int]:
    """Return the order of a rank's forwards and backwards: c + 1 stands for F of chunk c, -(c + 1) for its backward.

    The list does not name microbatches, so both the forwards and the backwards of a chunk must process microbatches in
    ascending order. Raises UserError if the schedule processes microbatches in another order.
    """
    order: list[int] = []
    for step in _forwards_and_backwards(schedule, rank):
        way = (1 if step.kind is PassKind.F else -1) * (step.chunk + 1)
        if step.microbatch != (reached := order.count(way)):
            raise UserError(
                "--cuda-graph-impl transformer_engine needs the microbatches of each chunk in ascending order, but on "
                f"rank {rank} {step} comes before the same pass of microbatch {reached}: use "
                "--cuda-graph-impl none"
            )
        order.append(way)
    return order


def layer_order(
    schedule: Schedule, rank: int, graphed: Sequence[Sequence[bool]], weights: bool
) -> tuple[list[float], list[list[int] | None]]:
    """Return the order of single layers, and of each forward its chunk and layer, in the form of Megatron's
    `get_overlap_moe_expert_parallel_comm_order`: n stands for F of the n-th layer with a graph, -n for its backward,
    -n - 0.5 for its weight gradients, if `weights`. `graphed[c]` says which layers of chunk c have graphs.

    Megatron derives this order from its own schedule, where every backward before the last forward belongs to a pair.
    """
    numbers = count(1)
    placed = [[(place, next(numbers)) for place, has in enumerate(chunk) if has] for chunk in graphed]
    steps: list[tuple[tuple[int, float, int], float, list[int] | None]] = []
    for time, step in enumerate(_forwards_and_backwards(schedule, rank)):
        forward = step.kind is PassKind.F
        # In a pair, the backward goes down its layers while the forward goes up, one layer each at a time.
        start = time - (not forward and (rank, step) in schedule.partners)
        for layer, (place, number) in enumerate(placed[step.chunk]):
            if forward:
                steps.append(((start, place, 0), number, [step.chunk, layer]))
                continue
            behind = len(graphed[step.chunk]) - 1 - place
            steps.append(((start, behind, 1), -number, None))
            if weights:  # The first layer's come behind the pair, see `Plan.run`.
                steps.append(((start, behind if place else math.inf, 2), -number - 0.5, None))
    steps.sort(key=itemgetter(0))
    return [number for _, number, _ in steps], [where for _, _, where in steps]


def _forwards_and_backwards(schedule: Schedule, rank: int) -> list[Pass]:
    return [step for step in schedule.ranks[rank] if step.kind in (PassKind.F, PassKind.B, PassKind.BW)]


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
        built = _model(self.model, True)
        sizes = built.groups.cp.size(), self.seq_length, self.micro_batch_size
        _, schedule, _ = _planned(built, get_num_microbatches(), *sizes, gradients=True)
        rank = built.pipeline.groups.rank
        order = graph_order(schedule, rank)

        def by_layer(_order: Any, _layers: Any, weights: bool) -> Any:
            graphed = []
            for core, callables in zip(unwrap_model(self.model), self.callables_per_chunk, strict=True):
                layers = chain(core.decoder.layers, core.mtp.layers if hasattr(core, "mtp") else ())
                graphed.append([getattr(layer, "mtp_model_layer", layer) in callables for layer in layers])
            return layer_order(schedule, rank, graphed, weights)

        with (
            mock.patch.object(cuda_graphs, "convert_schedule_table_to_order", lambda *_: order),
            mock.patch.object(cuda_graphs, "get_overlap_moe_expert_parallel_comm_order", by_layer),
        ):
            return original(self)

    return _get_cuda_graph_input_data


def _skipping(original: Callable[..., None]) -> Callable[..., None]:
    """Let an iteration be skipped (`--iterations-to-skip`) on ranks with several chunks, for which Megatron has a list
    of data iterators, and on middle stages, which have no data.
    """

    @wraps(original)
    def dummy_train_step(data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None) -> None:
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        rerun = get_rerun_state_machine()
        while rerun.should_run_forward_backward(data_iterator):
            for iterator in filter(None, iterators):
                for _ in range(get_num_microbatches()):
                    next(iterator)

    return dummy_train_step
