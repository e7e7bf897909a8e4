"""How many vocabulary rows each pipeline rank of this job holds: `--vocab-shards`, resolved before Megatron starts."""

from __future__ import annotations

import argparse

from megatron_vp.jobs.vocab_shards import ShardChoice
from megatron_vp.mcore.choices import chosen_family
from megatron_vp.mcore.storage.dataset import padded_vocabulary
from megatron_vp.schedule import VocabMethod
from megatron_vp.shards import check_stage_rows


def resolve_rows(args: argparse.Namespace) -> None:
    """Set `args.vocab_rows`: rows by pipeline rank, the tensor ranks of a stage together; None for equal shards.

    Every rank comes to the same rows, from the arguments alone. Call it before Megatron validates them. Raises
    UserError.
    """
    args.vocab_rows = ShardChoice.parse(args.vocab_shards).rows if args.vocab_parallel else None


def check_rows(args: argparse.Namespace) -> None:
    """Raise UserError for rows that do not fit validated Megatron arguments."""
    if args.vocab_rows is None:
        return
    vocab_size = padded_vocabulary(args)
    if vocab_size is not None:  # else the model's own size is compared when its layers are cut
        sizes = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
        check_stage_rows(args.vocab_rows, vocab_size, *sizes)


def needs_even_shards(args: argparse.Namespace) -> bool:
    """Whether all ranks do the vocabulary work of a microbatch in one pass together."""
    return chosen_family(args).own_method is VocabMethod.INTERLACED


def describe_rows(args: argparse.Namespace) -> str | None:
    """The rows in one line; None for equal shards."""
    if args.vocab_rows is None:
        return None
    return f"vocabulary rows by pipeline rank: {','.join(map(str, args.vocab_rows))} (--vocab-shards)"
