"""Describes how a job splits its model, for reports from which a later job chooses its vocabulary shards."""

from __future__ import annotations

from contextlib import suppress

from megatron_vp.errors import UserError
from megatron_vp.jobs import virtual_stages
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.trace.partition import SIZES, Partition
from megatron_vp.vocab.shards import VocabShards


def partition_of(args: Arguments) -> Partition:
    """Collect the layers per stage, the vocabulary rows per rank if known, and the sizes that determine pass times."""
    tensor, rows = args.tensor_model_parallel_size, args.vocab_rows
    if rows is None and args.vocab_parallel and args.padded_vocab_size:
        shards = VocabShards(args.padded_vocab_size, args.pipeline_model_parallel_size * tensor, tensor)
        ranks = range(args.pipeline_model_parallel_size)
        rows = tuple(sum(shards.rows(rank * tensor + place) for place in range(tensor)) for rank in ranks)
    sizes = {name: getattr(args, name, None) for name in SIZES}
    known = tuple(sorted((name, size) for name, size in sizes.items() if size is not None))
    return Partition(layers_given(args), rows, tensor, known)


def layers_given(args: Arguments) -> tuple[int, ...] | None:
    """As `virtual_stages.layers_given`, but None for a layout that only Megatron can parse."""
    with suppress(UserError):
        return virtual_stages.layers_given(vars(args))
    return None
