"""What reports need to know of a job: how it splits its model, and which iterations --pipeline-trace records."""

from __future__ import annotations

from contextlib import suppress

from megatron_vp.errors import UserError
from megatron_vp.jobs import virtual_stages
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.trace.partition import SIZES, Partition
from megatron_vp.vocab.shards import VocabShards


def partition_of(args: Arguments) -> Partition:
    """Collect the vocabulary rows per rank if known, and the sizes that determine pass times."""
    tensor, rows = args.tensor_model_parallel_size, args.vocab_rows
    if rows is None and args.vocab_parallel and args.padded_vocab_size:
        shards = VocabShards(args.padded_vocab_size, args.pipeline_model_parallel_size * tensor, tensor)
        ranks = range(args.pipeline_model_parallel_size)
        rows = tuple(sum(shards.rows(rank * tensor + place) for place in range(tensor)) for rank in ranks)
    sizes = {name: getattr(args, name, None) for name in SIZES}
    known = tuple(sorted((name, size) for name, size in sizes.items() if size is not None))
    return Partition(rows, known)


def layers_given(args: Arguments) -> tuple[int, ...] | None:
    """As `virtual_stages.layers_given`, but None for a layout that only Megatron can parse."""
    with suppress(UserError):
        return virtual_stages.layers_given(vars(args))
    return None


def iterations_in(text: str) -> range:
    """Parse a range of iterations, such as `3-5`, or `4` for a single iteration. Raises UserError."""
    first, _, last = text.partition("-")
    try:
        iterations = range(int(first), int(last or first) + 1)
    except ValueError:
        iterations = range(0)
    if not iterations or iterations[0] < 1:
        raise UserError(
            f"--pipeline-trace-iterations {text} is not a range of iterations: give A-B with 1 <= A <= B, such as 3-5"
        )
    return iterations
