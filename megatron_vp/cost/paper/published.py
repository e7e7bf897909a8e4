"""Reads the paper's models and measurements, and users' files in the format of `evidence/data/published_mfu.csv`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_vp.cost.sizes.shapes import Job, ModelShape
from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text

METHODS = {5: ("baseline", "redis", "vocab-1", "vocab-2", "interlaced"), 6: ("baseline", "vocab-1")}
"""Methods in the paper's tables 5 (1F1B) and 6 (V-Half)."""

LARGEST = 10_000
"""The largest MFU in percent, and the largest memory in GiB, that a file of published cells may give."""


@dataclass(frozen=True, order=True)
class Cell:
    """One run of the paper, on `gpus` pipeline ranks, with a vocabulary of `vocab_k` thousand tokens."""

    table: int
    gpus: int
    sequence: int
    method: str
    vocab_k: int

    def __str__(self) -> str:
        return (
            f"table {self.table}, {self.gpus} GPUs, sequence length {self.sequence}, {self.method}, "
            f"vocabulary size {self.vocab_k}k"
        )

    @property
    def setup(self) -> tuple[int, int, int]:
        """Table, GPUs and sequence length."""
        return self.table, self.gpus, self.sequence


@dataclass(frozen=True)
class Measurement:
    """A cell's published MFU in percent and memory in GiB; both are None if the run did not fit into memory."""

    mfu: float | None
    memory: float | None


@cache
def jobs() -> dict[Cell, Job]:
    """Return all cells of both tables with their jobs."""
    found = {}
    for row in _packaged("models.csv"):
        table, gpus = int(row["table"]), int(row["gpus"])
        for sequence in map(int, row["seq_lengths"].split("/")):
            for method in METHODS[table]:
                for vocab_k in map(int, row["vocab_k"].split("/")):
                    found[Cell(table, gpus, sequence, method, vocab_k)] = _job(row, sequence, 1000 * vocab_k)
    return found


def _job(row: dict[str, str], sequence: int, vocab: int) -> Job:
    hidden = int(row["hidden_size"])
    model = ModelShape(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=int(row["attention_heads"]),
        ffn=4 * hidden,
        vocab=vocab,
        dropout=True,
    )
    return Job(
        model,
        sequence,
        micro_batch=int(row["micro_batch_size"]),
        microbatches=int(row["num_microbatches"]),
        pipeline=int(row["gpus"]),
        wide_gradients=False,
        exact_shards=True,
    )


def read_cells(path: Path) -> dict[Cell, Measurement]:
    """Read the cells of a file in the format of `evidence/data/published_mfu.csv`.

    Raises UserError for a file that cannot be read, lacks a column, repeats a cell, or has a cell that is not in the
    paper's tables.
    """
    text = read_text(path, "published cells", MIB)
    return _cells(csv.DictReader(text.splitlines()), str(path))


def _cells(rows: Iterable[dict[str, str]], source: str) -> dict[Cell, Measurement]:
    known, found = jobs(), {}
    for number, row in enumerate(rows, 2):

        def value(column: str, kind: Callable, row: dict = row, number: int = number) -> Any:
            try:
                text = row[column].strip()
                found = None if kind is float and not text else kind(text)
            except (KeyError, AttributeError):
                raise UserError(f"{source}, line {number}: column {column} is missing") from None
            except ValueError:
                raise UserError(
                    f"{source}, line {number}: {column} {row[column]!r} is not a valid {kind.__name__}"
                ) from None
            if kind is float and found is not None and not 0 < found <= LARGEST:
                raise UserError(
                    f"{source}, line {number}: {column} is {found}; give a number above 0 and at most {LARGEST}"
                )
            return found

        cell = Cell(
            value("table", int),
            value("gpus", int),
            value("seq_length", int),
            value("method", str),
            value("vocab_k", int),
        )
        if cell not in known:
            raise UserError(f"{source}, line {number}: the paper's tables do not contain this cell ({cell})")
        if cell in found:
            raise UserError(f"{source}, line {number}: {cell} occurs twice; keep one of the two")
        found[cell] = Measurement(value("mfu_percent", float), value("peak_memory_gb", float))
    if not found:
        raise UserError(
            f"{source} contains no measurements; write one per line below this header: "
            "table,gpus,seq_length,method,vocab_k,mfu_percent,peak_memory_gb"
        )
    return found


def scaling_factors() -> dict[tuple[int, str, int], float]:
    """Table 3's percentages of linear scaling, keyed by sequence length, layer (such as `output-vocab-1`) and GPUs."""
    return {
        (int(row["seq_length"]), row["layer"], int(row["gpus"])): float(row["percent_of_linear"])
        for row in _packaged("table3_scaling.csv")
    }


def _packaged(name: str) -> list[dict[str, str]]:
    """Read a file of published figures from the package."""
    text = (files("megatron_vp.cost.paper") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
