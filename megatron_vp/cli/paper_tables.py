"""`megatron-vp paper tables`: predict the paper's tables, and compare them with the published values."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.result_output import format_for, progress_bar, write
from megatron_vp.errors import UserError

if TYPE_CHECKING:
    from megatron_vp.cost.paper.published import Cell
    from megatron_vp.cost.paper.runs import CellPrediction, Setting


class Format(StrEnum):
    """The output formats of the command."""

    TABLE = "table"
    CSV = "csv"
    PNG = "png"


def register(app: typer.Typer, summary: str = "Predict every cell of the paper's tables.") -> None:
    """Add the command to `app`."""
    app.command("tables", short_help=summary)(tables)


def tables(
    published: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of published values to compare with, with the columns table, gpus, seq_length, method, "
            "vocab_k, mfu_percent and peak_memory_gb."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Predict MFU and memory of this project's code in bf16 on this hardware, instead of those of the "
            "authors' code on A100s."
        ),
    ] = None,
    fp8_recipe: Annotated[
        str | None,
        typer.Option(help="fp8 recipe of the layers (tensorwise, delayed, blockwise or mxfp8); needs --hardware."),
    ] = None,
    asked_format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Output format (default: the one that the -o file's suffix names, else a table)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the output to this file instead of the screen.")
    ] = None,
) -> None:
    """Predict the paper's tables 5 (1F1B) and 6 (V-Half), and the output layer's part of table 3. No GPU is needed.

    MFU is the model's FLOP/s divided by 320 TFLOP/s (table 5) or 312 TFLOP/s (table 6). Memory is the allocator's peak
    on the fullest rank, in GiB. --published adds the published values, the relative error of each prediction, and the
    mean and largest absolute value of these errors. --hardware predicts the same jobs with this project's own code on
    the given hardware.
    """
    from megatron_vp.cost.paper.published import jobs, read_cells
    from megatron_vp.cost.paper.tables import make_rows, to_csv

    output_format = format_for(asked_format, output, Format)
    setting = _setting(hardware, fp8_recipe)
    if setting is not None and published is not None:
        raise UserError(
            "--published cannot be combined with --hardware, because its values were measured on A100s; leave one out"
        )
    known = {} if published is None else read_cells(published)
    rows = make_rows(_predict(list(jobs()), setting), known)
    match output_format:
        case Format.CSV:
            write(to_csv(rows), output)
        case Format.TABLE:
            from megatron_vp.cost.paper.tables_text import to_text

            write(to_text(rows, setting), output)
        case Format.PNG:
            from megatron_vp.cost.hardware.gpus import GIB
            from megatron_vp.cost.paper.tables_picture import picture

            write(picture(rows) if setting is None else picture(rows, setting.hardware.memory / GIB), output)


def _setting(hardware: str | None, fp8_recipe: str | None) -> Setting | None:
    from megatron_vp.cost.hardware.gpus import find_hardware
    from megatron_vp.cost.paper.published import jobs
    from megatron_vp.cost.paper.runs import Setting
    from megatron_vp.cost.sizes.shapes import Fp8Recipe

    if fp8_recipe is not None and hardware is None:
        raise UserError(
            f"--fp8-recipe {fp8_recipe} needs --hardware, because the paper's A100s have no fp8; add --hardware h100"
        )
    if fp8_recipe is not None and fp8_recipe not in list(Fp8Recipe):
        raise UserError(f"--fp8-recipe {fp8_recipe!r} is unknown; use {', '.join(Fp8Recipe)}")
    if hardware is None:
        return None
    setting = Setting(find_hardware(hardware), None if fp8_recipe is None else Fp8Recipe(fp8_recipe))
    setting.job(next(iter(jobs())))  # Raises UserError here, before any prediction, if the setting is impossible.
    return setting


def _predict(cells: list[Cell], setting: Setting | None) -> list[CellPrediction]:
    from megatron_vp.cost.paper.runs import predict_cells

    found = []
    with progress_bar() as progress:
        task = progress.add_task("predicting cells", total=len(cells))
        for group in predict_cells(cells, len(os.sched_getaffinity(0)), setting):
            found += group
            progress.update(task, advance=len(group))
    return found
