"""Which layers every virtual stage of a job holds, from its arguments alone: every rank comes to the same answer."""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import NamedTuple

from megatron_vp.jobs.layout_text import layers_in
from megatron_vp.schedule.placement import Placement


class Layers(NamedTuple):
    """How many layers hold attention, an MLP, a recurrence; a hybrid model's layer holds one of them."""

    attention: int
    mlp: int
    recurrent: int


def all_layers(args: argparse.Namespace) -> Layers:
    """Of the whole model, without the layers of multi-token prediction."""
    if args.hybrid_layer_pattern is None:
        return Layers(args.num_layers, args.num_layers, 0)
    return _counted(args.hybrid_layer_pattern.partition("/")[0])


def layers_by_stage(args: argparse.Namespace, placement: Placement) -> list[Layers]:
    """Of every virtual stage, the layers of multi-token prediction on the last one.

    Args:
        args: Megatron's validated arguments.
        placement: which virtual stage each chunk of each rank is.
    """
    if args.hybrid_layer_pattern is not None:
        segments = args.hybrid_layer_pattern.partition("/")[0].split("|")
        if len(segments) != placement.stages:  # without bars Megatron cuts the pattern as it cuts layers
            (whole,) = segments
            starts = [0]
            for count in _evenly_placed(args, placement, len(whole)):
                starts.append(starts[-1] + count)
            segments = [whole[start:end] for start, end in pairwise(starts)]
        stages = [_counted(segment) for segment in segments]
        heads = [_counted(head) for head in args.hybrid_layer_pattern.split("/")[1:]]
    else:
        if args.pipeline_model_parallel_layout is not None:
            counts = list(layers_in(str(args.pipeline_model_parallel_layout)))
        else:
            counts = _evenly_placed(args, placement, args.num_layers)
        stages = [Layers(count, count, 0) for count in counts]
        heads = [Layers(1, 1, 0)] * (args.mtp_num_layers or 0)
    for head in heads:
        stages[-1] = Layers(*map(sum, zip(stages[-1], head, strict=True)))
    return stages


def _evenly_placed(args: argparse.Namespace, placement: Placement, layers: int) -> list[int]:
    """Layers by virtual stage where no layout names them, as Megatron shares them out."""
    ranks, chunks = placement.ranks, placement.chunks
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is None and last is None:
        # The vocabulary layers may count as one layer each.
        ends = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
        by_rank = [(layers + sum(ends)) // ranks] * ranks
        counts = [[each // chunks] * chunks for each in by_rank]
        counts[0][0] -= ends[0]
        counts[-1][-1] -= ends[1]
    else:
        given = {rank: count for rank, count in ((0, first), (ranks - 1, last)) if count is not None}
        others = (layers - sum(given.values())) // max(ranks - len(given), 1)
        counts = [[given.get(rank, others) // chunks] * chunks for rank in range(ranks)]
    found = [0] * placement.stages
    for rank, stages in enumerate(placement.stage_of):
        for chunk, stage in enumerate(stages):
            found[stage] = counts[rank][chunk]
    return found


def _counted(pattern: str) -> Layers:
    return Layers(*(sum(map(pattern.count, symbols)) for symbols in ("*D+", "-E", "MG")))
