"""Parses `--vocab-shards`, which sets how many vocabulary rows each pipeline rank holds."""

from __future__ import annotations

from pathlib import Path

from megatron_vp.errors import UserError

BALANCED, EVEN = "balanced", "even"
"""Predicted pass times determine each rank's rows, so that all ranks take the same time; or every rank has the same
number of rows, apart from rounding.
"""


def shards_of(text: object) -> str | Path | tuple[int, ...]:
    """Read a value of `--vocab-shards`: BALANCED (which None means), EVEN, the folder of `measured:DIR`, or the rows of
    each pipeline rank, summed over the tensor ranks of its stage. Raises UserError.
    """
    words = BALANCED if text is None else str(text).strip()
    if words in (BALANCED, EVEN):
        return words
    if words.startswith("measured:"):
        return Path(words.removeprefix("measured:"))
    numbers = [number.strip() for number in words.split(",")]
    if not all(number.removeprefix("-").isdecimal() and len(number) < 20 for number in numbers):
        raise UserError(
            f"--vocab-shards {words} cannot be parsed: use balanced, even, measured:DIR, or one number of rows per "
            "pipeline rank such as 64000,64256,0,0"
        )
    return tuple(map(int, numbers))


STAYS_WHOLE = (
    "--vocab-parallel gains nothing here: no split of the vocabulary is predicted to be faster and to fit into memory, "
    "so Megatron's own vocabulary layers are kept, as without the flag; another schedule, another layout or fewer "
    "stages may gain (megatron-vp plan says which), and --vocab-shards even splits in any case"
)
NEEDS_VOCAB_PARALLEL = (
    "--vocab-shards {vocab_shards} has no effect without --vocab-parallel: add --vocab-parallel, or leave "
    "--vocab-shards out"
)
EVEN_ALONE = (
    "--vocab-shards {vocab_shards} with --pipeline-schedule {pipeline_schedule} is not supported: all ranks "
    "compute the vocabulary layers of a microbatch at the same time, so their shards must be equal; use --vocab-shards "
    "even, or another schedule"
)
