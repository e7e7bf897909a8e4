"""Writes lists of jobs that repeat the runs in the paper's tables. Each line has a job's name and arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from megatron_vp.cost.paper.published import Cell, jobs
from megatron_vp.cost.paper.runs import plan_of
from megatron_vp.cost.sizes.shapes import Plan
from megatron_vp.errors import UserError
from megatron_vp.files import replacing
from megatron_vp.jobs.layout_text import layout_of
from megatron_vp.schedule import DEFAULT_SCHEDULE, VocabMethod

MODELS = {
    5: {8: "gpt_4b", 16: "gpt_10b", 32: "gpt_21b"},
    6: {16: "gpt_7b", 24: "gpt_16b", 32: "gpt_30b"},
}
"""Names of the models' configurations, by table of the paper and by number of GPUs."""

_COLUMNS = ("cell", "arguments")


def cell_name(cell: Cell) -> str:
    """The name of a cell and of its folder, such as `table5-8-2048-vocab-1-32k`."""
    return f"table{cell.table}-{cell.gpus}-{cell.sequence}-{cell.method}-{cell.vocab_k}k"


def cell_arguments(cell: Cell) -> list[str]:
    """The arguments of `pretrain_gpt_vp.py` for a cell, with the names of shipped configurations."""
    job = jobs()[cell]
    plan = plan_of(cell)
    overlays = [MODELS[cell.table][cell.gpus], "data/timing"]
    if plan.schedule != DEFAULT_SCHEDULE:
        overlays.append(f"methods/{plan.schedule}")
    if plan.vocab not in (VocabMethod.NONE, VocabMethod.INTERLACED):
        overlays.append(f"methods/{plan.vocab}")
    words = [f"--config={path}" for path in overlays]
    words += [f"--seq-length={job.sequence}", f"--max-position-embeddings={job.sequence}"]
    words += [f"--vocab-size={job.model.vocab}"]
    if plan.layers is not None:
        words.append(f"--pipeline-model-parallel-layout={_layout(plan)}")
    return words


def write_lists(folder: Path, cells: Iterable[Cell]) -> dict[int, tuple[Path, int]]:
    """Write FOLDER/N_gpus.tsv for every number of GPUs N: a header, then one line per cell with its name and arguments.

    Returns the path and the number of cells of each file, by number of GPUs.
    """
    by_gpus: dict[int, list[Cell]] = {}
    for cell in sorted(cells):
        by_gpus.setdefault(cell.gpus, []).append(cell)
    written = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for gpus, listed in sorted(by_gpus.items()):
            path = folder / f"{gpus}_gpus.tsv"
            rows = [_COLUMNS, *((cell_name(cell), shlex.join(cell_arguments(cell))) for cell in listed)]
            with replacing(path) as file:
                file.write("".join("\t".join(row) + "\n" for row in rows).encode())
            written[gpus] = path, len(listed)
    except OSError as error:
        raise UserError(f"cannot write the job lists to {folder}: {error.strerror}") from None
    return written


def _layout(plan: Plan) -> str:
    assert plan.layers is not None
    return layout_of(plan.layers)
