"""The cells of the paper's tables with their models, and files of published or measured values."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megatron_vp.cost.layers.shapes import Job, ModelShape
from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text

METHODS = {5: ("baseline", "redis", "vocab-1", "vocab-2", "interlaced"), 6: ("baseline", "vocab-1")}
"""Methods in the paper's tables 5 (1F1B) and 6 (V-Half)."""

MODELS = {
    (5, 8): ("gpt_4b", 32, 24, 3072),
    (5, 16): ("gpt_10b", 48, 32, 4096),
    (5, 32): ("gpt_21b", 64, 40, 5120),
    (6, 16): ("gpt_7b", 32, 32, 4096),
    (6, 24): ("gpt_16b", 48, 40, 5120),
    (6, 32): ("gpt_30b", 64, 48, 6144),
}
"""Configuration, layers, attention heads and hidden size of each model, by table and number of GPUs."""

COLUMNS = ("table", "gpus", "seq_length", "method", "vocab_k", "mfu_percent", "peak_memory_gb")
"""The columns of a file of published or measured cells."""

LARGEST = 10_000
"""The largest MFU in percent, and the largest memory in GiB, that a file of published cells may give."""


class Cell(NamedTuple):
    """One run of the paper, on `gpus` pipeline ranks, with a vocabulary of `vocab_k` thousand tokens."""

    table: int
    gpus: int
    sequence: int
    method: str
    vocab_k: int

    def __str__(self) -> str:
        """The name of the cell and of its folder, such as `table5-8-2048-vocab-1-32k`."""
        return f"table{self.table}-{self.gpus}-{self.sequence}-{self.method}-{self.vocab_k}k"

    @property
    def setup(self) -> tuple[int, int, int]:
        """Table, GPUs and sequence length."""
        return self[:3]


class Measurement(NamedTuple):
    """A cell's published MFU in percent and memory in GiB; both are None if the run did not fit into memory."""

    mfu: float | None
    memory: float | None


@dataclass(frozen=True)
class Row:
    """A cell's predicted MFU in percent, its allocated peak in GiB, whether it fits into the device's memory, and its
    published values, if there are any.
    """

    cell: Cell
    mfu: float
    memory: float
    fits: bool
    published: Measurement | None = None

    def error(self, quantity: str) -> float | None:
        """Relative error of the predicted quantity in percent; positive if the prediction is too high."""
        published = getattr(self.published, quantity, None)
        return 100 * (getattr(self, quantity) / published - 1) if published else None

    @property
    def out_of_memory(self) -> bool:
        """Whether the cell was published as a run that did not fit into memory."""
        return self.published is not None and self.published.memory is None


@cache
def jobs() -> dict[Cell, Job]:
    """Return all cells of both tables with their jobs."""
    found = {}
    for (table, gpus), (_, layers, heads, hidden) in MODELS.items():
        for sequence, method, vocab_k in product((2048, 4096), METHODS[table], (32, 64, 128, 256)):
            model = ModelShape(
                layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=1000 * vocab_k, dropout=True
            )
            found[Cell(table, gpus, sequence, method, vocab_k)] = Job(
                model, sequence, micro_batch=1, microbatches=128, pipeline=gpus, wide_gradients=False, exact_shards=True
            )
    return found


def read_cells(path: Path) -> dict[Cell, Measurement]:
    """Read a CSV file with the columns COLUMNS, where an empty field stands for None.

    Raises UserError for a file that cannot be read, lacks a column, repeats a cell, or has a cell that is not in the
    paper's tables.
    """
    found: dict[Cell, Measurement] = {}
    for number, row in enumerate(csv.DictReader(read_text(path, "published cells", MIB).splitlines()), 2):
        try:
            table, gpus, sequence, method, vocab_k, *values = (row[name].strip() for name in COLUMNS)
            cell = Cell(int(table), int(gpus), int(sequence), method, int(vocab_k))
            entry = Measurement(*(float(value) if value else None for value in values))
            if (
                cell not in jobs()
                or cell in found
                or not all(0 < each <= LARGEST for each in entry if each is not None)
            ):
                raise ValueError(cell)
        except (KeyError, AttributeError, ValueError):
            raise UserError(
                f"{path}, line {number} is not a cell of the paper's tables, or repeats one: give the columns "
                f"{','.join(COLUMNS)}, with MFU and memory above 0 and at most {LARGEST}"
            ) from None
        found[cell] = entry
    if not found:
        raise UserError(f"{path} contains no measurements; write one per line below this header: {','.join(COLUMNS)}")
    return found
