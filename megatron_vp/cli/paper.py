"""`megatron-vp tables` predicts the paper's tables; `megatron-vp paper` helps to reproduce them."""

from __future__ import annotations

import csv
import io
import math
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.cli.planning import OutputOption
from megatron_vp.cli.result_output import check_destination, format_for, progress_lines, write
from megatron_vp.cli.sbatch import batch_files
from megatron_vp.errors import UserError


class Format(StrEnum):
    """The output formats of `tables`."""

    TABLE = "table"
    CSV = "csv"
    PNG = "png"


def register(app: typer.Typer) -> None:
    """Add the command `tables` and the command group `paper` to `app`."""
    group = typer.Typer(rich_markup_mode=None)
    group.command("jobs", short_help="Write job lists for the paper's tables.")(list_jobs)
    group.command("collect", short_help="Turn the logs of the paper's runs into CSV.")(collect)
    app.add_typer(group, name="paper", help="Reproduce the paper's tables.")
    app.command("tables", short_help="Predict every cell of the paper's tables.")(tables)


def tables(
    published: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of published values to compare with, with the columns table, gpus, seq_length, method, "
            "vocab_k, mfu_percent and peak_memory_gb."
        ),
    ] = None,
    asked_format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Output format (default: the one that the -o file's suffix names, else a table)."
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Predict the paper's tables 5 (1F1B) and 6 (V-Half). No GPU is needed.

    MFU is the model's FLOP/s divided by 320 TFLOP/s (table 5) or 312 TFLOP/s (table 6). Memory is the allocator's peak
    on the fullest rank, in GiB. --published adds the published values, the relative error of each prediction, and the
    mean and largest absolute value of these errors.
    """
    from megatron_vp.cost.paper.published import jobs, read_cells
    from megatron_vp.cost.paper.runs import predict_cell
    from megatron_vp.cost.paper.tables import make_rows, picture, to_csv, to_text

    output_format = format_for(asked_format, output, Format)
    known = {} if published is None else read_cells(published)
    predicted = []
    progress = progress_lines()
    for cell in jobs():
        predicted.append(predict_cell(cell))
        progress("predicting cells", len(predicted), len(jobs()))
    formatted = {Format.CSV: to_csv, Format.TABLE: to_text, Format.PNG: picture}[output_format]
    write(formatted(make_rows(predicted, known)), output)


def list_jobs(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the job lists and the runs' logs.")
    ] = Path("runs/tables"),
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs per node.")] = 8,
) -> None:
    """List the runs for all cells of the paper's tables, for submission as SLURM job arrays.

    Writes one list for each number of GPUs, and prints the command that submits it. When the runs have finished,
    turn their logs into CSV with megatron-vp paper collect DIR.
    """
    from megatron_vp.cost.paper.cells import write_lists
    from megatron_vp.cost.paper.published import jobs

    place = batch_files()
    there = (
        [f"--export=ALL,MEGATRON_VP_SLURM={place},MEGATRON_VP_PYTHON={sys.executable}"] if place.is_absolute() else []
    )
    for gpus, (path, count) in write_lists(output, jobs()).items():
        nodes, per_node = math.ceil(gpus / gpus_per_node), min(gpus, gpus_per_node)
        words = ["sbatch", f"--nodes={nodes}", f"--gpus-per-node={per_node}", f"--array=1-{count}", *there]
        typer.echo(shlex.join([*words, str(place / "tables.sbatch"), str(path)]))


def collect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `megatron-vp paper jobs` created.")],
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="GPU, such as h100, whose peak FLOP/s are taken as 100 % MFU (default: the paper's A100s).",
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Extract results from the logs of the runs that `megatron-vp paper jobs` listed. The output is CSV that
    `megatron-vp tables --published` reads.

    MFU is computed as in the paper. Memory is the peak of PyTorch's allocator on the fullest rank, in GiB. A run that
    ran out of memory has empty fields. Missing and unusable logs are listed on standard error.
    """
    from megatron_vp.cost.hardware.gpus import find_hardware
    from megatron_vp.cost.layers.flops import paper_flops
    from megatron_vp.cost.layers.job_sizes import job_of
    from megatron_vp.cost.paper.cells import read_run
    from megatron_vp.cost.paper.published import COLUMNS, jobs
    from megatron_vp.cost.paper.runs import PEAK_FLOPS
    from megatron_vp.jobs.job_config import read_job_config
    from megatron_vp.jobs.resolved import RESOLVED_NAME

    check_destination(False, output)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder: give the folder that `megatron-vp paper jobs` created and that contains the "
            "runs' logs"
        )
    device = None if hardware is None else find_hardware(hardware)
    rows, missing = [], []
    for cell in sorted(jobs()):
        logs = folder / str(cell)
        run = read_run(logs)
        if isinstance(run, str):
            missing.append(f"{cell}: {run}")
            continue
        mfu = ""
        if run.seconds is not None:
            arguments = read_job_config([logs / RESOLVED_NAME], [])
            job = job_of(arguments, arguments["world_size"])
            peak = PEAK_FLOPS[cell.table] if device is None else device.peak_flops
            mfu = f"{100 * paper_flops(job) / run.seconds / job.gpus / peak:.4g}"
        memory = "" if run.memory is None else f"{run.memory:.2f}"
        rows.append((*cell, mfu, memory))
    if not rows:
        raise UserError(
            f"{folder} contains no finished run ({missing[0]}); submit the runs that `megatron-vp paper jobs` lists"
        )
    for line in missing:
        typer.echo(line, err=True)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([COLUMNS, *rows])
    write(table.getvalue(), output)
