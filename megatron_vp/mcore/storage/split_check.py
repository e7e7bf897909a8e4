"""Finds a --split that divides a dataset into parts that all have documents."""

from __future__ import annotations

import re

PARTS = ("training", "validation", "test")
MEGATRONS_SPLIT = "969,30,1"
"""Megatron's default split for --data-path."""


def split_documents(split: str, documents: int) -> list[tuple[int, int] | None]:
    """Return the ranges of documents, (first, last + 1), for training, validation and test. A part whose share in
    `split` is 0 gets None.

    The ranges are computed as in Megatron's `BlendedMegatronDatasetBuilder`.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return [ends and (round(ends[0] * float(documents)), round(ends[1] * float(documents))) for ends in matrix]


def split_with_documents(split: str, documents: int) -> str:
    """Return a split in which every nonzero part of `split` has a document. If there are too few documents for this,
    all of them are for training.
    """
    shares = [*_shares(split), 0.0, 0.0]
    others = [int(share > 0) for share in shares[1 : len(PARTS)]]
    if not shares[0] or documents <= sum(others):
        return "1,0,0"
    return ",".join(map(str, (documents - sum(others), *others)))


def split_for(documents: int) -> str | None:
    """Return a --split for this many documents; None if Megatron's default split leaves no part empty."""
    suits = all(begin < end for begin, end in filter(None, split_documents(MEGATRONS_SPLIT, documents)))
    return None if suits else split_with_documents(MEGATRONS_SPLIT, documents)


def _shares(split: str) -> list[float]:
    return [float(share) for share in re.findall(r"[.0-9]+", split)]  # Megatron parses --split in the same way.
