"""Formats the paper's tables as text, with one block per setup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from megatron_vp.cost.paper.published import Cell, scaling_factors
from megatron_vp.cost.paper.runs import Setting, scaling_factor
from megatron_vp.cost.paper.tables import Errors, Row, errors, other_layout_rows
from megatron_vp.schedule import VocabMethod

_TITLES = {5: "Table 5 (1F1B)", 6: "Table 6 (V-Half)"}


def to_text(rows: Sequence[Row], setting: Setting | None = None) -> str:
    """Format all tables as text, with errors in percent and a summary if there are published values.

    With a `setting`, the rows are predictions for this project, and Table 3, which describes the authors' code, is left
    out.
    """
    lines = ["predicted MFU in percent and peak memory in GiB; ! marks runs that do not fit in memory"]
    if setting is not None:
        lines.append(
            f"the runs use megatron_vp on {setting}; MFU is relative to the 16-bit peak, "
            f"{setting.hardware.peak_flops / 1e12:.0f} TFLOP/s"
        )
    compared = any(row.published for row in rows)
    if compared:
        lines.append("each value is followed by its relative error in percent; oom: the published run did not fit")
    for (table, gpus, sequence), setup in groupby(rows, key=lambda row: row.cell.setup):
        lines += ["", f"{_TITLES[table]}, {gpus} GPUs, sequence {sequence}", *_block(list(setup), compared)]
    if setting is None:
        lines += ["", *table_3()]
    if compared:
        lines += ["", *_summary(rows)]
    return "\n".join(lines) + "\n"


def _block(rows: list[Row], compared: bool) -> list[str]:
    width = 13 if compared else 8
    vocabularies = sorted({row.cell.vocab_k for row in rows})
    heads = "".join(f"{f'{size}k':>{width}}" for size in vocabularies)
    whole = width * len(vocabularies)
    lines = [f"{'':11}{'MFU':>{whole}}  {'GiB':>{whole}}", f"{'':11}{heads}  {heads}"]
    for method, group in groupby(rows, key=lambda row: row.cell.method):
        cells = list(group)
        mfu = [_entry(f"{row.predicted.mfu:.2f}", row.mfu_error, row, compared) for row in cells]
        memory = [_entry(_memory(row), row.memory_error, row, compared) for row in cells]
        texts = ("".join(f"{entry:>{width}}" for entry in entries) for entries in (mfu, memory))
        lines.append(f"{method:11}{'  '.join(texts)}")
    return lines


def _memory(row: Row) -> str:
    return f"{'' if row.predicted.fits else '!'}{row.predicted.memory:.2f}"


def _entry(value: str, error: float | None, row: Row, compared: bool) -> str:
    if not compared:
        return value
    behind = "oom" if row.out_of_memory else "" if error is None else f"{error:+.1f}"
    return f"{value}{behind:>6}"


def table_3() -> list[str]:
    """Format the predicted and published throughput of the split output layer, one line per published value."""
    lines = ["Table 3: throughput of the split output layer in percent of linear scaling, vocabulary 256k"]
    lines.append(f"{'':11}{'sequence':>10}{'GPUs':>6}{'predicted':>11}{'published':>11}{'points':>8}")
    for (sequence, layer, gpus), published in scaling_factors().items():
        if layer == "input":
            continue
        method = VocabMethod(layer.removeprefix("output-"))
        predicted = scaling_factor(Cell(5, gpus, sequence, "baseline", 256), method)
        lines.append(f"{method:11}{sequence:10}{gpus:6}{predicted:11.2f}{published:11.2f}{predicted - published:+8.2f}")
    return lines


def _summary(rows: Sequence[Row]) -> list[str]:
    others = other_layout_rows(rows)
    apart = {row.cell for row in others}
    lines = [_line("all published cells", rows)]
    if others:
        name = "without cells that have an unknown pipeline layout and an MFU error above 5 percent"
        lines.append(_line(name, [row for row in rows if row.cell not in apart]))
        for row in others:
            assert row.predicted.layers is not None
            last = row.predicted.layers[-1]
            lines.append(f"  {row.cell}: MFU error {row.mfu_error:+.1f} percent with {last} layers on the last stage")
    for setup, group in groupby(rows, key=lambda row: row.cell.setup):
        cells = list(group)
        if any(row.published for row in cells):
            lines.append(_line("  table {}, {} GPUs, sequence {}".format(*setup), cells))
    wrong = [row.cell for row in rows if row.published and not row.fit_as_published]
    lines += [f"  prediction and publication disagree on whether this cell fits: {cell}" for cell in wrong]
    return lines


def _line(name: str, rows: Iterable[Row]) -> str:
    rows = list(rows)

    def figures(of: Callable[[Row], float | None]) -> str:
        found: Errors | None = errors(rows, of)
        return "unknown" if found is None else f"mean {found.mean:.2f}, largest {found.largest:.2f} percent"

    mfu, memory = figures(lambda row: row.mfu_error), figures(lambda row: row.memory_error)
    return f"{name}: MFU error {mfu}; memory error {memory}"
