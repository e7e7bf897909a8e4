"""Write the README's picture and tables: predictions of Llama 3 8B on H100, and published runs with their predictions.

    python scripts/before_after.py [--check]

`--check` writes nothing and exits with status 1 if the figures or the picture are out of date. The picture stores a
digest of what it shows, so the comparison does not depend on the version of the drawing library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.comparison import predicted
from evidence.public_rows import PublicRow, read_rows
from megatron_vp.cli.planning import GIB, Request, read_cluster
from megatron_vp.cost.hardware.gpus import Hardware
from megatron_vp.cost.layers.layer_operations import layer_weights
from megatron_vp.cost.layers.shapes import Job, Plan
from megatron_vp.cost.planning.candidates import candidates
from megatron_vp.cost.planning.predict import Prediction, make_simulator, predict
from megatron_vp.cost.planning.stage_costs import layers_of, stage_costs
from megatron_vp.schedule import PassKind, Schedule, VocabMethod

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "before_after.png"

CONFIG, HARDWARE, NODES = "configs/llama3_8b.yaml", "h100", 4
LEAST_GPUS = 128
"""Published runs with fewer GPUs than this are not shown."""
WINDOW = 2.5
"""The picture shows this many seconds of an iteration."""

COLOURS = {
    "forward": "#7BA3CC",
    "backward": "#93C08E",
    "vocabulary": "#E8590C",
    "weights": "#5B6B7B",
    "activations": "#B9C4CF",
    "other": "#E3E7EB",
}
LABELS = {
    "forward": "transformer layers, forward",
    "backward": "transformer layers, backward",
    "vocabulary": "embedding and output layer",
    "weights": "layers: weights, gradients, optimizer",
    "activations": "activations",
    "other": "outside PyTorch's allocator, buffers",
}


class Box(NamedTuple):
    """Work that a rank does from `start` to `end`, in seconds."""

    start: float
    end: float
    colour: str


@dataclass(frozen=True)
class Run:
    """A way to train the job, and its prediction."""

    title: str
    schedule: Schedule
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """The seconds of an iteration."""
        return self.prediction.iteration_seconds

    @property
    def peak(self) -> float:
        """The memory of the fullest rank, in GiB."""
        return max(rank.total for rank in self.prediction.memory) / GIB

    def boxes(self, rank: int) -> list[Box]:
        """The work of `rank` within the window. A pass that includes a whole vocabulary layer is cut in two."""
        found: list[Box] = []
        spans = self.prediction.timeline.spans[rank]
        for step, (start, end) in zip(self.schedule.ranks[rank], spans, strict=True):
            if start >= WINDOW:
                break
            if not step.kind.per_chunk:
                found.append(Box(start, end, "vocabulary"))
                continue
            stage = self.schedule.placement.stage_of[rank][step.chunk]
            colour = "forward" if step.kind is PassKind.F else "backward"
            cut = (end - start) * self.vocabulary_share(stage, step.kind)
            # The embedding is at the start of a forward and at the end of a backward; the output layer is at the other
            # end.
            if (stage == 0) == (step.kind is PassKind.F):
                found += [Box(start, start + cut, "vocabulary"), Box(start + cut, end, colour)]
            else:
                found += [Box(start, end - cut, colour), Box(end - cut, end, "vocabulary")]
        return [Box(box.start, min(box.end, WINDOW), box.colour) for box in found if min(box.end, WINDOW) > box.start]

    def vocabulary_share(self, stage: int, kind: PassKind) -> float:
        """The fraction of a pass on `stage` that a vocabulary layer takes; nonzero on the first and last stage of plain
        runs.
        """
        prediction, last = self.prediction, self.schedule.placement.stages - 1
        if prediction.plan.vocab is not VocabMethod.NONE or stage not in (0, last):
            return 0.0
        costs = stage_costs(prediction.job, prediction.plan, self.schedule, prediction.hardware.alike)
        times = [costs.F] if kind is PassKind.F else [costs.B, costs.W]
        return 1 - sum(time[1] for time in times) / sum(time[stage] for time in times)

    def memory(self, rank: int) -> dict[str, float]:
        """The memory of a rank in GiB, by purpose; weights, gradients and optimizer state of vocabulary layers count as
        vocabulary.
        """
        prediction = self.prediction
        parts = prediction.memory[rank].parts()
        layers = layers_of(prediction.job, prediction.plan, self.schedule.placement)
        weights = sum(layers[stage] for stage in self.schedule.placement.stage_of[rank])
        share = weights * layer_weights(prediction.job) * prediction.job.element_bytes / parts["parameters"]
        state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        found = {
            "weights": share * state,
            "activations": parts["activations"],
            "vocabulary": (1 - share) * state + parts["vocabulary"],
            "other": parts["communication"] + parts["outside"],
        }
        return {name: size / GIB for name, size in found.items()}


def request() -> Request:
    """The job that the picture shows, with 8 pipeline ranks and 4 replicas."""
    return Request.of(*read_cluster([ROOT / CONFIG], [], HARDWARE, NODES, None))


def runs(asked: Request) -> list[Run]:
    """The runs that are compared: plain Megatron, tuned Megatron, and ours."""
    plans = {
        "vocabulary parallel, 1F1B": Plan("1f1b", VocabMethod.VOCAB_2),
        "vocabulary parallel, V-Half": Plan("v-half", VocabMethod.VOCAB_2),
    }
    ours = [run_of(asked.job, asked.hardware, title, plan) for title, plan in plans.items()]
    return [run_of(asked.job, asked.hardware, "plain Megatron, 1F1B", Plan()), tuned(asked), *ours]


def tuned(asked: Request) -> Run:
    """The fastest of Megatron's own schedules that fits in memory, with moved layers, as in the table of `plan`."""
    own = (
        each for each in candidates(asked.job, asked.hardware) if each.in_megatron and each.method == "redistributed"
    )
    found = [run_of(asked.job, asked.hardware, "", each) for each in own]
    best = min((run for run in found if run.prediction.fits()), key=lambda run: run.seconds)
    name = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}[best.prediction.plan.schedule]
    return replace(best, title=f"Megatron tuned, {name}")


def run_of(job: Job, hardware: Hardware, title: str, plan: Plan) -> Run:
    """A run of a plan, with its prediction."""
    simulator = make_simulator(job, plan, hardware)
    return Run(title, simulator.schedule, predict(job, plan, hardware, simulator=simulator))


def marks(block: str) -> tuple[str, str]:
    """The marker lines before and after a block."""
    return f"<!-- begin {block} -->\n", f"<!-- end {block} -->\n"


def block_of(page: str, block: str) -> str:
    """The content of a block in `page`."""
    begin, end = marks(block)
    return page.split(begin)[1].split(end)[0]


def with_block(page: str, block: str, content: str) -> str:
    """Return `page` with the content of a block replaced."""
    begin, end = marks(block)
    before, rest = page.split(begin)
    return before + begin + content + end + rest.split(end)[1]


def public() -> str:
    """A Markdown table of published runs: for each model, the largest pipeline run on 128 or more H100, and its
    prediction.
    """
    largest: dict[str, PublicRow] = {}
    for row in read_rows():
        fits = row.judged and row["gpu"] == "h100" and row["pp"] not in ("", "1") and row.gpus >= LEAST_GPUS
        if fits and (row["model"] not in largest or row.gpus > largest[row["model"]].gpus):
            largest[row["model"]] = row
    lines = ["| run | published, tokens/s per GPU | predicted | error |", "|---|---|---|---|"]
    for row in largest.values():
        found = predicted(row)
        assert found.tokens_per_second is not None and found.error is not None
        lines.append(
            f"| {row['model']}, {row.gpus} GPUs, {row['precision']}, p = {row['pp']} | {row.tokens_per_second:,.0f} "
            f"| {found.tokens_per_second:,.0f} | {100 * found.error:+.1f} % |"
        )
    return "\n".join(lines) + "\n"


def table(found: list[Run]) -> str:
    """A Markdown table with the time, hardware utilisation and memory of each run."""
    lines = ["| predicted | seconds per iteration | MFU | memory of the fullest rank |", "|---|---|---|---|"]
    lines += [
        f"| {run.title} | {run.seconds:.2f} | {100 * run.prediction.mfu:.1f} % | {run.peak:.1f} GiB |" for run in found
    ]
    return "\n".join(lines) + "\n"


def written(page: str, found: list[Run]) -> str:
    """Return the page with everything that this script writes to it."""
    return with_block(with_block(page, "predicted", table(found)), "public", public())


def shown(found: list[Run]) -> list[Run]:
    """The runs that the picture shows."""
    return [run for run in found if run.prediction.plan.layers is None and "tuned" not in run.title]


def digest(found: list[Run]) -> str:
    """A digest of everything that the picture shows, rounded to a millisecond and a hundredth of a GiB."""
    content = [
        (
            run.title,
            f"{run.seconds:.2f}",
            [
                [
                    [(round(box.start, 3), round(box.end, 3), box.colour) for box in run.boxes(rank)],
                    {name: round(size, 2) for name, size in run.memory(rank).items()},
                ]
                for rank in range(run.schedule.pipeline_size)
            ],
        )
        for run in shown(found)
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def stored_digest() -> str:
    """The digest that is stored in the file of the picture."""
    from PIL import Image

    with Image.open(PICTURE) as picture:
        return picture.info.get("Description", "")


def draw(asked: Request, found: list[Run]) -> None:
    """Draw a row of panels for each run: its ranks over time, and their memory."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = shown(found)
    figure = Figure(figsize=(10, 1.2 + 1.75 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 2, sharex="col", width_ratios=(3, 1))
    ranks = range(asked.job.pipeline)
    for (times, memory), run in zip(grid, panels, strict=True):
        for rank in ranks:
            for colour in ("forward", "backward", "vocabulary"):
                boxes = [(box.start, box.end - box.start) for box in run.boxes(rank) if box.colour == colour]
                style = {"facecolor": COLOURS[colour], "edgecolor": "white"}
                times.broken_barh(boxes, (rank - 0.4, 0.8), linewidth=0.2 * (colour != "vocabulary"), **style)
            left = 0.0
            for name, size in run.memory(rank).items():
                memory.barh(rank, size, 0.8, left=left, color=COLOURS[name])
                left += size
        for axes in (times, memory):
            axes.set_ylim(len(ranks) - 0.5, -0.5)
            axes.spines[["top", "right"]].set_visible(False)
        times.set_xlim(0, WINDOW)
        times.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks], fontsize=7)
        times.set_title(f"{run.title}: {run.seconds:.1f} s per iteration", loc="left", fontsize=10)
        memory.set_yticks([])
        memory.set_title(f"fullest rank {run.peak:.1f} GiB", loc="left", fontsize=10)
        for axes in (times, memory):
            axes.tick_params(labelsize=8)
    grid[-1][0].set_xlabel(f"the first {WINDOW:g} seconds of an iteration; white: the rank waits", fontsize=9)
    grid[-1][1].set_xlabel("memory per rank, GiB", fontsize=9)
    figure.suptitle(
        f"Predicted, not measured: Llama 3 8B, {asked.job.gpus} H100, p = {asked.job.pipeline} pipeline ranks, "
        f"m = {asked.job.microbatches} microbatches, vocabulary {asked.job.model.vocab:,}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    patches = [Patch(facecolor=COLOURS[name], label=LABELS[name]) for name in COLOURS]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(PICTURE, dpi=130, metadata={"Description": digest(found)})


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if out of date")
    check = parser.parse_args().check
    asked = request()
    found = runs(asked)
    page = README.read_text(encoding="utf-8")
    fresh = written(page, found)
    if check:
        stale = [PICTURE.name] * (stored_digest() != digest(found)) + [README.name] * (fresh != page)
        print(f"out of date: {', '.join(stale)}; run this script without --check" if stale else "up to date")
        return int(bool(stale))
    draw(asked, found)
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
