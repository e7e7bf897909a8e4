"""Describes how a job splits its model, for reports from which a later job chooses its vocabulary shards."""

from __future__ import annotations

import argparse

from megatron_vp.errors import UserError
from megatron_vp.jobs.layout_text import layers_in
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.jobs.virtual_stages import shifted_layers
from megatron_vp.trace.partition import SIZES, Partition
from megatron_vp.vocab.shards import VocabShards


def partition_of(args: argparse.Namespace) -> Partition:
    """Collect the layers per stage, the vocabulary rows per rank if known, and the sizes that determine pass times."""
    tensor, rows = args.tensor_model_parallel_size, args.vocab_rows
    if rows is None and args.vocab_parallel and args.padded_vocab_size:
        shards = VocabShards(args.padded_vocab_size, args.pipeline_model_parallel_size * tensor, tensor)
        ranks = range(args.pipeline_model_parallel_size)
        rows = tuple(sum(shards.rows(rank * tensor + place) for place in range(tensor)) for rank in ranks)
    sizes = {name: getattr(args, name, None) for name in SIZES}
    known = tuple(sorted((name, size) for name, size in sizes.items() if size is not None))
    return Partition(layers_given(args), rows, tensor, known)


def layers_given(args: argparse.Namespace) -> tuple[int, ...] | None:
    """Return the number of layers per virtual stage from a layout, a hybrid pattern or the options of SHIFTS; None if
    none of these is given.
    """
    pattern, layout = pattern_in(vars(args)), args.pipeline_model_parallel_layout
    if pattern is not None and pattern.layers is not None:
        return pattern.layers
    try:
        return shifted_layers(vars(args)) if layout is None else layers_in(str(layout))
    except UserError:  # `layers_in` does not parse every layout that Megatron accepts.
        return None
