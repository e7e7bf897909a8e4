"""`megatron-vp paper jobs` and `paper collect`: list the runs of the paper's tables, and turn their logs into CSV."""

from __future__ import annotations

import csv
import io
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.result_output import check_destination, write
from megatron_vp.cli.sbatch import batch_files
from megatron_vp.errors import UserError

if TYPE_CHECKING:
    from megatron_vp.cost.paper.measured import Run
    from megatron_vp.cost.paper.published import Cell

COLUMNS = ("table", "gpus", "seq_length", "method", "vocab_k", "mfu_percent", "peak_memory_gb")


def register(app: typer.Typer) -> None:
    """Add both commands to `app`."""
    app.command("jobs", short_help="Write job lists for the paper's tables.")(list_jobs)
    app.command("collect", short_help="Turn the logs of the paper's runs into CSV.")(collect)


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
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="CSV file to write.")] = None,
) -> None:
    """Extract results from the logs of the runs that `megatron-vp paper jobs` listed. The output is CSV that
    `megatron-vp paper tables --published` reads.

    MFU is computed as in the paper. Memory is the peak of PyTorch's allocator on the fullest rank, in GiB. A run that
    ran out of memory has empty fields. Missing and unusable logs are listed on standard error.
    """
    from megatron_vp.cost.hardware.gpus import find_hardware
    from megatron_vp.cost.paper.cells import cell_name
    from megatron_vp.cost.paper.measured import read_run
    from megatron_vp.cost.paper.published import jobs
    from megatron_vp.cost.paper.runs import PEAK_FLOPS

    check_destination(False, output)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder: give the folder that `megatron-vp paper jobs` created and that contains the "
            "runs' logs"
        )
    device = None if hardware is None else find_hardware(hardware)
    rows, missing = [], []
    for cell in sorted(jobs()):
        run = read_run(folder / cell_name(cell))
        if isinstance(run, str):
            missing.append(f"{cell}: {run}")
            continue
        peak = PEAK_FLOPS[cell.table] if device is None else device.peak_flops
        rows.append(_row(cell, run, folder / cell_name(cell), peak))
    if not rows:
        raise UserError(
            f"{folder} contains no finished run ({missing[0]}); submit the runs that `megatron-vp paper jobs` lists"
        )
    for line in missing:
        typer.echo(line, err=True)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([COLUMNS, *rows])
    write(table.getvalue(), output)


def _row(cell: Cell, run: Run, folder: Path, peak: float) -> tuple[object, ...]:
    from megatron_vp.cost.sizes.flops import paper_flops
    from megatron_vp.cost.sizes.job_sizes import job_of
    from megatron_vp.jobs.resolved import RESOLVED_NAME, read_resolved

    mfu = memory = ""
    if run.seconds is not None:
        arguments = read_resolved(folder / RESOLVED_NAME)
        job = job_of(arguments, arguments["world_size"])
        mfu = f"{100 * paper_flops(job) / run.seconds / job.gpus / peak:.4g}"
    if run.memory is not None:
        memory = f"{run.memory:.2f}"
    return cell.table, cell.gpus, cell.sequence, cell.method, cell.vocab_k, mfu, memory
