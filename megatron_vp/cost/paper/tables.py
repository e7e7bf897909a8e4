"""Compares predictions of the paper's tables with published values, as CSV, text and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from megatron_vp.cost.paper.published import COLUMNS, METHODS, Cell, Measurement, Row
from megatron_vp.schedule.draw import aligned, saved

_TITLES = {5: "Table 5 (1F1B)", 6: "Table 6 (V-Half)"}
_QUANTITIES = {"mfu": ("MFU", "MFU, percent"), "memory": ("GiB", "peak memory, GiB")}
"""What both tables show of each cell, with its title in the text and in the picture."""
_COLORS = {"baseline": "C7", "redis": "C1", "vocab-1": "C0", "vocab-2": "C2", "interlaced": "C3"}
_MEMORY = 80
"""Memory of the authors' GPUs in GiB."""


def make_rows(predictions: Iterable[Row], published: Mapping[Cell, Measurement]) -> list[Row]:
    """Join predictions and published values, in the order of the tables."""
    rows = [replace(row, published=published.get(row.cell)) for row in predictions]
    return sorted(
        rows, key=lambda row: (*row.cell.setup, METHODS[row.cell.table].index(row.cell.method), row.cell.vocab_k)
    )


def errors(rows: Iterable[Row], quantity: str) -> tuple[float, float] | None:
    """Mean and maximum of the absolute values of the rows' errors in percent; None if no error is known."""
    found = [abs(error) for row in rows if (error := row.error(quantity)) is not None]
    return (fmean(found), max(found)) if found else None


def _blocks(rows: Sequence[Row]) -> dict[tuple[int, int, int], dict[str, list[Row]]]:
    """The rows by setup and method. Each setup is one block of the text and one column of the picture."""
    return {
        setup: {method: list(cells) for method, cells in groupby(block, key=lambda row: row.cell.method)}
        for setup, block in groupby(rows, key=lambda row: row.cell.setup)
    }


def to_csv(rows: Iterable[Row]) -> str:
    """Format the rows as CSV with a header; a missing published value or error becomes an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    published = [f"published_{column}" for column in COLUMNS[-2:]]
    writer.writerow((*COLUMNS, *published, *(f"{quantity}_error_percent" for quantity in _QUANTITIES)))
    for row in rows:
        numbers = [getattr(of, quantity, None) for of in (row, row.published) for quantity in _QUANTITIES]
        texts = ("" if number is None else f"{number:.2f}" for number in (*numbers, *map(row.error, _QUANTITIES)))
        writer.writerow((*row.cell, *texts))
    return out.getvalue()


def to_text(rows: Sequence[Row]) -> str:
    """Format both tables as text, with errors in percent and a summary if there are published values."""
    compared = any(row.published for row in rows)
    lines = ["predicted MFU in percent and peak memory in GiB; ! marks runs that do not fit in memory"]
    if compared:
        lines.append("each value is followed by its relative error in percent; oom: the published run did not fit")
    for (table, gpus, sequence), methods in _blocks(rows).items():
        sizes = [f"{row.cell.vocab_k}k" for row in next(iter(methods.values()))]
        heads = [f"{title} {size}" for title, _ in _QUANTITIES.values() for size in sizes]
        body = [
            [method, *(_entry(row, name, compared) for name in _QUANTITIES for row in cells)]
            for method, cells in methods.items()
        ]
        lines += ["", f"{_TITLES[table]}, {gpus} GPUs, sequence {sequence}", *aligned([["", *heads], *body])]
    if compared:
        said = []
        for name, (_, label) in _QUANTITIES.items():
            found = errors(rows, name)
            size = "unknown" if found is None else f"mean {found[0]:.2f}, largest {found[1]:.2f} percent"
            said.append(f"{label.split(',')[0]} error {size}")
        lines += ["", f"all published cells: {'; '.join(said)}"]
        wrong = (row.cell for row in rows if row.published and row.fits is row.out_of_memory)
        lines += [f"  prediction and publication disagree on whether this cell fits: {cell}" for cell in wrong]
    return "\n".join(lines) + "\n"


def _entry(row: Row, quantity: str, compared: bool) -> str:
    value = f"{'!' * (quantity == 'memory' and not row.fits)}{getattr(row, quantity):.2f}"
    error = row.error(quantity)
    behind = "oom" if row.out_of_memory else "" if error is None else f"{error:+.1f}"
    return f"{value}{behind:>6}" if compared else value


def picture(rows: Sequence[Row]) -> bytes:
    """Draw a PNG with one panel per setup and quantity over the vocabulary size.

    Solid lines show predictions, and crosses show published values. Dotted lines show the GPUs' memory.
    """
    from matplotlib.figure import Figure

    blocks = _blocks(rows)
    tables = {table: [setup for setup in blocks if setup[0] == table] for table in sorted({each[0] for each in blocks})}
    columns = max(map(len, tables.values()))
    figure = Figure(figsize=(2.9 * columns, 5 * len(tables)), layout="constrained")
    axes = figure.subplots(2 * len(tables), columns, squeeze=False, sharex=True, sharey="row")
    for place, (table, setups) in enumerate(tables.items()):
        for column, setup in enumerate(setups):
            for row, (quantity, (_, label)) in enumerate(_QUANTITIES.items(), 2 * place):
                axis = axes[row][column]
                for method, cells in blocks[setup].items():
                    sizes = [each.cell.vocab_k for each in cells]
                    published = [getattr(each.published, quantity, None) or float("nan") for each in cells]
                    axis.plot(sizes, [getattr(each, quantity) for each in cells], color=_COLORS[method], label=method)
                    axis.plot(sizes, published, "x", color=_COLORS[method])
                axis.set_xscale("log", base=2)
                axis.set_xticks(sizes, [str(size) for size in sizes])
                axis.set(xlabel="vocabulary, thousand tokens", ylabel=label)
                axis.label_outer()
                axis.grid(alpha=0.3)
            axes[2 * place][column].set_title(f"table {table}: {setup[1]} GPUs, sequence {setup[2]}", fontsize=9)
            axes[2 * place + 1][column].axhline(_MEMORY, color="k", linestyle=":", linewidth=1)
        axes[2 * place][0].plot([], [], "kx", label="published")
        axes[2 * place][0].legend(fontsize=7)
    return saved(figure)
