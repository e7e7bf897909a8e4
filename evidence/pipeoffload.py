"""Predict figure 15 of PipeOffload (Wan et al., arXiv 2503.01328) with this project's pass orders.

    python evidence/pipeoffload.py [--format table|csv]

As in the published figure, memory includes only activations: the largest number of layers whose activations a rank
holds at once, times the activation bytes of one layer.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence import figures
from megatron_vp.cli.result_output import progress_lines
from megatron_vp.cost.layers.shapes import Job, ModelShape, Plan
from megatron_vp.cost.paper.published import Measurement
from megatron_vp.cost.paper.runs import A100, paper_mfu
from megatron_vp.cost.planning.predict import make_simulator, predict
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.cost.ranks.rank_memory import GIB
from megatron_vp.schedule import Held, Schedule
from megatron_vp.schedule.ledger import changes

SEQUENCES = (4096, 8192, 16384, 32768)

METHODS = ("1f1b-i", "gis", "gis-h", "po-h", "po-f", "1f1b")
"""Methods in the figure's order: 1F1B-I is interleaved 1F1B; GIS and GIS-H are the paper's own interleaved schedules,
which split the backward. PO-H offloads half of the chunks, rounded up; PO-F offloads all chunks.
"""

VOCABULARY = 50_304
"""The vocabulary size is assumed, because the paper does not publish it."""

KEPT = 16.7
"""Bytes per token and hidden unit that a layer keeps in addition to its keys and values. Without keys and values (4),
dropout masks (2), and the recomputed outputs of norms and GELU (12), 16 of the usual 34 bytes remain. Small tensors add
0.7.
"""

COMPUTED_AGAIN = 12
"""Bytes per token and hidden unit that one layer's backward recomputes: outputs of both norms and of the GELU."""

COLUMNS = (
    "model",
    "seq_length",
    "method",
    "mfu_percent",
    "peak_memory_gb",
    "published_mfu_percent",
    "published_peak_memory_gb",
)


@dataclass(frozen=True)
class Model:
    """One of the figure's models and how it was run; all of the `gpus` are pipeline ranks."""

    layers: int
    heads: int
    hidden: int
    microbatches: int
    gpus: int
    chunks: int


MODELS = {"10.5B": Model(38, 40, 5120, 64, 8, 5), "18.1B": Model(46, 48, 6144, 128, 16, 3)}


class Cell(NamedTuple):
    """One run shown in figure 15 of PipeOffload."""

    model: str
    sequence: int
    method: str

    @property
    def job(self) -> Job:
        """The job of this run."""
        sizes = MODELS[self.model]
        shape = ModelShape(
            sizes.layers, sizes.hidden, sizes.heads, 4 * sizes.hidden, VOCABULARY, kv_groups=KEYS_AND_VALUES
        )
        kept = KEPT + 4 * KEYS_AND_VALUES / sizes.heads
        return Job(shape, self.sequence, 1, sizes.microbatches, sizes.gpus, kept_bytes=kept)

    @property
    def plan(self) -> Plan:
        """The run's plan: one layer per stage, but none on the first and the last stage.

        With 1F1B, each rank has all its layers in one chunk.
        """
        sizes = MODELS[self.model]
        chunks = sizes.chunks
        if self.method == "1f1b":
            return Plan("1f1b", layers=(chunks - 1, *[chunks] * (sizes.gpus - 2), chunks - 1))
        schedule = {"1f1b-i": "interleaved", "po-h": "po", "po-f": "po"}.get(self.method, self.method)
        offloaded = {"po-h": (chunks + 1) // 2, "po-f": chunks}.get(self.method, 0)
        layers = (0, *[1] * sizes.layers, 0)
        return Plan(schedule, chunks=chunks, layers=layers, offload_chunks=offloaded)

    @property
    def layer_bytes(self) -> float:
        """Bytes of activations that one layer keeps for a microbatch."""
        job = self.job
        return job.kept_bytes * job.tokens * job.model.hidden


KEYS_AND_VALUES = 8
"""Number of query groups in each of the figure's models."""


@dataclass(frozen=True)
class CellPrediction:
    """MFU in percent of 312 TFLOP/s, and activations in GiB."""

    cell: Cell
    mfu: float
    memory: float


def published() -> dict[Cell, Measurement]:
    """Read the published values of the figure's runs."""

    def number(text: str) -> float | None:
        return float(text) if text else None

    return {
        Cell(row["model"], int(row["seq_length"]), row["method"]): Measurement(
            number(row["mfu_percent"]), number(row["peak_memory_gb"])
        )
        for row in figures("pipeoffload.csv")
    }


def resident_layers(schedule: Schedule, layers: Sequence[int]) -> int:
    """Largest number of (layer, microbatch) pairs whose activations a rank holds at once; `layers`: the number of
    layers of each stage.
    """
    most = 0
    for rank, order in enumerate(schedule.ranks):
        level = 0
        for step, (taken, given) in zip(order, changes(order, Held.ACTIVATIONS), strict=True):
            count = layers[schedule.placement.stage_of[rank][step.chunk]]
            level += count * taken
            most = max(most, level)
            level -= count * given
    return most


def predict_cell(cell: Cell) -> CellPrediction:
    """Predict the MFU and the activation memory of one run in figure 15.

    With offloading, the published memory includes a buffer for reloading one layer. The prediction therefore adds the
    activations of one layer and the tensors that its backward recomputes.
    """
    job, plan = cell.job, cell.plan
    simulator = make_simulator(job, plan, A100, further_orders=False)
    found = predict(job, plan, A100, simulator=simulator)
    assert plan.layers is not None
    layers: float = resident_layers(simulator.schedule, plan.layers)
    if plan.offload_chunks:
        layers += 1 + COMPUTED_AGAIN / job.kept_bytes
    return CellPrediction(cell, paper_mfu(found, A100.peak_flops), layers * cell.layer_bytes / GIB)


def predict_cells(cells: Iterable[Cell], processes: int) -> Iterator[CellPrediction]:
    """Yield the predictions of `cells`, in the order in which they finish."""
    # Predictions for models on the most GPUs start first, so that no slow one is left running alone at the end.
    ordered = sorted(cells, key=lambda cell: (MODELS[cell.model].gpus, cell.plan.offload_chunks), reverse=True)
    with worker_pool(processes) as pool:
        for done in as_completed(pool.submit(predict_cell, cell) for cell in ordered):
            yield done.result()


def to_csv(predictions: Iterable[CellPrediction]) -> str:
    """Format the predictions as CSV, one line each. Published fields are empty if the published run ran out of memory
    or the paper gives no value.
    """
    out, known = io.StringIO(), published()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in in_order(predictions):
        of_paper = known[each.cell]
        shown = ("" if number is None else f"{number:g}" for number in (of_paper.mfu, of_paper.memory))
        writer.writerow((*each.cell, f"{each.mfu:.2f}", f"{each.memory:.2f}", *shown))
    return out.getvalue()


def to_text(predictions: Iterable[CellPrediction]) -> str:
    """Format a block per model, with a line per method. Each predicted value is followed by the published one."""
    known = published()
    found = {each.cell: each for each in predictions}
    lines = [
        "Figure 15 of PipeOffload: predicted MFU in percent and activations in GiB, each followed by the published "
        "value",
        "-: not published; oom: the published run did not fit",
    ]
    for model, sizes in MODELS.items():
        lines += ["", f"{model}, {sizes.gpus} A100, {sizes.microbatches} microbatches, {sizes.chunks} chunks per rank"]
        heads = "".join(f"{sequence:>15}" for sequence in SEQUENCES)
        lines += [f"{'':8}{'MFU':>{len(heads)}}  {'GiB':>{len(heads)}}", f"{'':8}{heads}  {heads}"]
        for method in METHODS:
            cells = [Cell(model, sequence, method) for sequence in SEQUENCES]
            mfu = "".join(_entry(found.get(cell), known.get(cell), "mfu") for cell in cells)
            memory = "".join(_entry(found.get(cell), known.get(cell), "memory") for cell in cells)
            lines.append(f"{method:8}{mfu}  {memory}")
    return "\n".join(lines) + "\n"


def _entry(predicted: CellPrediction | None, of_paper: Measurement | None, which: str) -> str:
    if predicted is None or of_paper is None:
        return f"{'-':>15}"
    value: float | None = getattr(of_paper, which)
    return f"{getattr(predicted, which):>9.1f}{'oom' if value is None else f'{value:g}':>6}"


def in_order(predictions: Iterable[CellPrediction]) -> list[CellPrediction]:
    """Sort predictions by model, sequence length and method, in the order of figure 15."""
    return sorted(
        predictions,
        key=lambda each: (list(MODELS).index(each.cell.model), each.cell.sequence, METHODS.index(each.cell.method)),
    )


def main(words: Sequence[str] | None = None) -> None:
    """Run the script with `words`, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=("table", "csv"), default="table")
    given = parser.parse_args(words)
    cells, found = published(), []
    progress = progress_lines()
    for each in predict_cells(cells, len(os.sched_getaffinity(0))):
        found.append(each)
        progress("predicting cells", len(found), len(cells))
    print(to_csv(found) if given.format == "csv" else to_text(found), end="")


if __name__ == "__main__":
    main()
