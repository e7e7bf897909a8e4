"""Lists jobs that repeat the runs in the paper's tables, and reads their iteration times and memory from their logs."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_vp.cost.paper.published import MODELS, Cell, jobs
from megatron_vp.cost.paper.runs import plan_of
from megatron_vp.cost.ranks.rank_memory import GIB
from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text, replacing
from megatron_vp.jobs.layout_text import layout_of
from megatron_vp.schedule import DEFAULT_SCHEDULE, VocabMethod

WARM_UP = 3
"""Number of initial iterations that are ignored, because kernels are still being compiled and tuned."""

# Patterns of Megatron's log lines. The last rank prints times, and every rank prints its memory in MiB.
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): ([\d.]+)")
_PEAK = re.compile(r"memory \(MB\) .*\| max allocated: ([\d.]+)")
_OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


def cell_arguments(cell: Cell) -> list[str]:
    """The arguments of `pretrain_gpt_vp.py` for a cell, with the names of shipped configurations."""
    plan = plan_of(cell)
    overlays = [MODELS[cell.table, cell.gpus][0], "data/timing"]
    if plan.schedule != DEFAULT_SCHEDULE:
        overlays.append(f"methods/{plan.schedule}")
    if plan.vocab not in (VocabMethod.NONE, VocabMethod.INTERLACED):
        overlays.append(f"methods/{plan.vocab}")
    words = [f"--config={path}" for path in overlays]
    words += [f"--seq-length={cell.sequence}", f"--max-position-embeddings={cell.sequence}"]
    words += [f"--vocab-size={jobs()[cell].model.vocab}"]
    if plan.layers is not None:
        words.append(f"--pipeline-model-parallel-layout={layout_of(plan.layers)}")
    return words


def write_lists(folder: Path, cells: Iterable[Cell]) -> dict[int, tuple[Path, int]]:
    """Write FOLDER/N_gpus.tsv for every number of GPUs N: a header, then one line per cell with its name and arguments.

    Returns the path and the number of cells of each file, by number of GPUs.
    """
    lines: dict[int, list[str]] = {}
    for cell in sorted(cells):
        listed = lines.setdefault(cell.gpus, ["cell\targuments\n"])
        listed.append(f"{cell}\t{shlex.join(cell_arguments(cell))}\n")
    written = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for gpus, listed in sorted(lines.items()):
            path = folder / f"{gpus}_gpus.tsv"
            with replacing(path) as file:
                file.write("".join(listed).encode())
            written[gpus] = path, len(listed) - 1
    except OSError as error:
        raise UserError(f"cannot write the job lists to {folder}: {error.strerror}") from None
    return written


class Run(NamedTuple):
    """Seconds per iteration (median without warm-up), and peak memory of the fullest rank in GiB, of a run.

    Both are None if the run ran out of memory. `memory` is also None if no log reports it.
    """

    seconds: float | None
    memory: float | None


def read_run(folder: Path) -> Run | str:
    """Read the run whose ranks logged to FOLDER/rank_*.log, or return the reason why it cannot be used."""
    logs = [read_text(path, "log", 1024 * MIB, errors="replace") for path in sorted(folder.glob("rank_*.log"))]
    if not logs:
        return "not run"
    if any(map(_OUT_OF_MEMORY.search, logs)):
        return Run(None, None)
    times = {number: float(elapsed) / 1000 for log in logs for number, elapsed in _ITERATION.findall(log)}
    counted = [seconds for number, seconds in times.items() if int(number) > WARM_UP]
    if not counted:
        return f"{folder} contains no iteration after the {WARM_UP} warm-up iterations"
    peaks = [float(peak) * 2**20 / GIB for log in logs for peak in _PEAK.findall(log)]
    return Run(statistics.median(counted), max(peaks, default=None))
