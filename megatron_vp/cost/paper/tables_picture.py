"""Plots predicted and published MFU and memory against vocabulary size, in one panel per setup."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from megatron_vp.cost.paper.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"baseline": "C7", "redis": "C1", "vocab-1": "C0", "vocab-2": "C2", "interlaced": "C3"}


def picture(rows: Sequence[Row], memory: float = 80) -> bytes:
    """Draw a PNG.

    Solid lines show predictions, and crosses show published values. Dotted lines show the device's `memory` in GiB.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    setups = [(setup, list(cells)) for setup, cells in groupby(rows, key=lambda row: row.cell.setup)]
    tables = sorted({setup[0] for setup, _ in setups})
    columns = max(sum(setup[0] == table for setup, _ in setups) for table in tables)
    figure, axes = pyplot.subplots(
        2 * len(tables),
        columns,
        figsize=(2.9 * columns, 2.5 * 2 * len(tables)),
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    for row, table in enumerate(tables):
        own = [(setup, cells) for setup, cells in setups if setup[0] == table]
        for column, (setup, cells) in enumerate(own):
            above, below = axes[2 * row][column], axes[2 * row + 1][column]
            _panel(above, cells, "mfu")
            _panel(below, cells, "memory")
            above.set_title(f"table {table}: {setup[1]} GPUs, sequence {setup[2]}", fontsize=9)
            below.axhline(memory, color="k", linestyle=":", linewidth=1)
        axes[2 * row][0].set_ylabel("MFU, percent")
        axes[2 * row + 1][0].set_ylabel("peak memory, GiB")
        axes[2 * row][0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("vocabulary, thousand tokens")
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    pyplot.close(figure)
    return out.getvalue()


def _panel(axis: Axes, cells: Sequence[Row], name: str) -> None:
    for method, rows in groupby(cells, key=lambda row: row.cell.method):
        group = list(rows)
        sizes = [row.cell.vocab_k for row in group]
        axis.plot(sizes, [getattr(row.predicted, name) for row in group], color=COLORS[method], label=method)
        shown = [row for row in group if row.published and getattr(row.published, name) is not None]
        axis.plot(
            [row.cell.vocab_k for row in shown],
            [getattr(row.published, name) for row in shown],
            "x",
            color=COLORS[method],
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.grid(alpha=0.3)
