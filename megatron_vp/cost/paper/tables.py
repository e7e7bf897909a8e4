"""Compares predictions of the paper's tables with published values, and formats both as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from megatron_vp.cost.paper.published import METHODS, Cell, Measurement
from megatron_vp.cost.paper.runs import CellPrediction, other_layouts, predict_cell

COLUMNS = (
    "table",
    "gpus",
    "seq_length",
    "method",
    "vocab_k",
    "mfu_percent",
    "peak_memory_gb",
    "published_mfu_percent",
    "published_peak_memory_gb",
    "mfu_error_percent",
    "memory_error_percent",
)


def layout_unknown(cell: Cell) -> bool:
    """Whether the layout of `cell` is unknown: the paper publishes the layouts of `redis` only for 8 GPUs."""
    return cell.method == "redis" and cell.gpus > 8


@dataclass(frozen=True)
class Row:
    """A predicted cell and its published values, if there are any."""

    predicted: CellPrediction
    published: Measurement | None = None

    @property
    def cell(self) -> Cell:
        """The run of the paper that `predicted` describes."""
        return self.predicted.cell

    @property
    def mfu_error(self) -> float | None:
        """Relative error of the predicted MFU in percent; positive if the prediction is too high."""
        published = self.published and self.published.mfu
        return 100 * (self.predicted.mfu / published - 1) if published else None

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory in percent."""
        published = self.published and self.published.memory
        return 100 * (self.predicted.memory / published - 1) if published else None

    @property
    def out_of_memory(self) -> bool:
        """Whether the cell was published as a run that did not fit into memory."""
        return self.published is not None and self.published.memory is None

    @property
    def fit_as_published(self) -> bool:
        """Whether the prediction and the published result agree on whether the run fits into memory."""
        return self.predicted.fits is not self.out_of_memory


@dataclass(frozen=True)
class Errors:
    """Mean and maximum of the absolute values of `count` relative errors, in percent."""

    mean: float
    largest: float
    count: int


def make_rows(predictions: Iterable[CellPrediction], published: Mapping[Cell, Measurement]) -> list[Row]:
    """Join predictions and published values into rows, in the order of the tables."""
    rows = [Row(prediction, published.get(prediction.cell)) for prediction in predictions]
    return sorted(rows, key=lambda row: _order(row.cell))


def _order(cell: Cell) -> tuple:
    return (*cell.setup, METHODS[cell.table].index(cell.method), cell.vocab_k)


def errors(rows: Iterable[Row], of: Callable[[Row], float | None]) -> Errors | None:
    """Mean and maximum of the absolute values of `of(row)` over all rows; None if `of` returns None for every row."""
    found = [abs(error) for error in map(of, rows) if error is not None]
    return Errors(fmean(found), max(found), len(found)) if found else None


def other_layout_rows(rows: Iterable[Row], worse_than: float = 5.0) -> list[Row]:
    """Rows of the `redis` cells whose layer layout is unknown, each with the layout that gives the smallest MFU error.

    The candidates are the layout assumed in `rows` and `other_layouts`. Cells whose MFU error in `rows` is at most
    `worse_than` percent are left out.
    """
    found = []
    for row in rows:
        cell = row.cell
        if not layout_unknown(cell) or abs(row.mfu_error or 0) <= worse_than:
            continue
        others = [Row(predict_cell(cell, layers=layers), row.published) for layers in other_layouts(cell)]
        found.append(min([row, *others], key=lambda candidate: abs(candidate.mfu_error or 0)))
    return found


def to_csv(rows: Iterable[Row]) -> str:
    """Format the rows as CSV with a header; a missing published value or error becomes an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        cell, published = row.cell, row.published or Measurement(None, None)
        numbers = (
            row.predicted.mfu,
            row.predicted.memory,
            published.mfu,
            published.memory,
            row.mfu_error,
            row.memory_error,
        )
        texts = ("" if number is None else f"{number:.2f}" for number in numbers)
        writer.writerow((cell.table, cell.gpus, cell.sequence, cell.method, cell.vocab_k, *texts))
    return out.getvalue()
