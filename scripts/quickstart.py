"""Train one small GPT twice on this machine, plain and with vocabulary parallelism, and compare the two runs.

    scripts/quickstart.sh [--output DIR] [--iterations N]

Four pipeline ranks: on GPUs if the machine has four, else on CPU processes over gloo. The text is the source and the
documentation strings of the running Python's standard library. Everything printed and drawn is measured in the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_vp.data.texts import standard_library_texts
from megatron_vp.mcore.platform.flags import quiet_fallback_warnings
from megatron_vp.mcore.storage.dataset import prepare
from megatron_vp.schedule.costs import StageCosts
from megatron_vp.schedule.draw import to_picture
from megatron_vp.schedule.families import generate
from megatron_vp.schedule.passes import VocabMethod
from megatron_vp.schedule.timeline import simulate

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
VOCABULARY = 16384
ALGORITHM = VocabMethod.VOCAB_2
PICTURE_MICROBATCHES = 8
FEWEST_ITERATIONS = 6
ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) .*?lm loss: (\S+)")

console = Console()


@dataclass(frozen=True)
class Run:
    """One finished training run: its losses by iteration, and every rank's report."""

    title: str
    vocab: VocabMethod
    losses: list[float]
    reports: list[dict]

    @property
    def seconds_per_iteration(self) -> float:
        """Mean over the iterations but the first, which warms up."""
        times = self.reports[0]["iteration_milliseconds"][1:]
        return sum(times) / len(times) / 1000

    def seconds(self, rank: int) -> float:
        """Time that a rank computes in an iteration."""
        report = self.reports[rank]
        return sum(report["pass_milliseconds"].values()) / report["iterations"] / 1000

    def share(self, rank: int) -> float:
        """The same as a part of the iteration time."""
        report = self.reports[rank]
        return 1000 * self.seconds(rank) * report["iterations"] / sum(report["iteration_milliseconds"])

    def costs(self) -> StageCosts:
        """Mean seconds of every kind of pass on every rank, of one microbatch, without the first iteration."""
        names = ("F", "B", *(("S", "T", "IF", "IB") if self.vocab.is_sharded else ()))
        microbatches = self.reports[0]["microbatches"]
        means = {
            name: tuple(
                fmean(times.get(name, 0.0) for times in report["pass_milliseconds_by_iteration"][1:])
                / 1000
                / microbatches
                for report in self.reports
            )
            for name in names
        }
        return StageCosts(**means, W=(0.0,) * RANKS)

    def predicted_seconds(self, cores: int) -> float:
        """An iteration of 1F1B with these pass times and free communication, on `cores` cores or devices.

        With fewer cores than ranks it takes no less than all work together, spread evenly over the cores.
        """
        costs = self.costs()
        schedule = generate(
            "1f1b", RANKS, self.reports[0]["microbatches"], vocab=self.vocab, costs=costs.nominal(RANKS)
        )
        timeline = simulate(schedule, costs)
        return max(timeline.makespan, sum(timeline.busy) / cores)


def main() -> None:
    """Prepare the data, train twice, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ROOT / "runs" / "quickstart"
    parser.add_argument("--output", type=Path, default=default, help="folder for data, logs and pictures")
    parser.add_argument("--iterations", type=int, help="instead of the configured number")
    options = parser.parse_args()
    if options.iterations is not None and options.iterations < FEWEST_ITERATIONS:
        parser.error(
            f"--iterations {options.iterations}: the learning rate warms up first; give {FEWEST_ITERATIONS} or more"
        )
    started = time.monotonic()
    output: Path = options.output.resolve()
    on_gpus = _gpus() >= RANKS
    console.print(f"[bold]1/3 text[/]: the standard library of Python {sys.version.split()[0]}")
    quiet_fallback_warnings()
    tokenizer, dataset = _data(output / "data")
    extra = [
        f"--data-path={dataset}",
        f"--tokenizer-model={tokenizer}",
        f"--data-cache-path={output / 'data' / 'cache'}",
        *([f"--train-iters={options.iterations}"] if options.iterations else []),
        *([] if on_gpus else ["--cpu"]),
    ]
    device = f"{RANKS} GPUs" if on_gpus else f"{RANKS} CPU processes on {os.cpu_count()} cores, over gloo"
    console.print(f"[bold]2/3 training[/]: {RANKS} pipeline ranks on {device}; same weights, same data")
    plain = _train("plain Megatron", VocabMethod.NONE, output / "plain", extra)
    split = _train("vocabulary parallel", ALGORITHM, output / ALGORITHM, [*extra, "--vocab-parallel"])
    console.print("[bold]3/3 comparison[/]")
    _print_comparison(plain, split, on_gpus)
    _draw_losses(plain, split, output / "loss.png")
    _draw_schedule(split, output / "schedule.png")
    console.print(f"loss curves: {output / 'loss.png'}\nschedule:    {output / 'schedule.png'}")
    console.print(f"done in {time.monotonic() - started:.0f} s; logs in {output / 'plain'} and {output / ALGORITHM}")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _data(folder: Path) -> tuple[Path, Path]:
    prepared = prepare(standard_library_texts(), folder, name="stdlib", vocab_size=VOCABULARY, overwrite=True)
    return prepared.tokenizer, prepared.dataset


def _train(title: str, vocab: VocabMethod, folder: Path, extra: list[str]) -> Run:
    """One run under torchrun; exits with its last lines if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    for stale in [*folder.glob("rank_*.json"), *(folder / "tensorboard").glob("events*")]:
        stale.unlink()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
        *(str(ROOT / "pretrain_gpt_vp.py"), f"--config={ROOT / 'configs' / 'quickstart.yaml'}"),
        *(f"--tensorboard-dir={folder / 'tensorboard'}", f"--rank-report={folder}"),
        *extra,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, log.open("w", encoding="utf-8") as log_file:
        task = progress.add_task(title, total=None, loss="starting")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        for line in process.stdout:
            log_file.write(line)
            match = ITERATION.search(line)
            if match:
                iteration, total, loss = int(match[1]), int(match[2]), float(match[3])
                progress.update(task, completed=iteration, total=total, loss=f"{iteration}/{total}  loss {loss:.3f}")
    if process.wait():
        console.print(
            "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-25:]), markup=False, highlight=False
        )
        sys.exit(f"{title} failed with status {process.returncode}; the whole log is in {log}")
    reports = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]
    return Run(title, vocab, _losses(folder / "tensorboard"), reports)


def _losses(folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars("lm loss")]


def _print_comparison(plain: Run, split: Run, on_gpus: bool) -> None:
    table = Table(title=f"measured: plain Megatron | {split.title} ({ALGORITHM})")
    table.add_column("rank")
    for column in ("parameters", "microbatches\nin flight", "computes, of an\niteration's time"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in range(RANKS):
        before, after = plain.reports[rank], split.reports[rank]
        table.add_row(
            str(rank),
            f"{before['parameters']:,} | {after['parameters']:,}",
            f"{before['peak_microbatches_in_flight']:g} | {after['peak_microbatches_in_flight']:g}",
            " | ".join(f"{run.seconds(rank):.2f} s {run.share(rank):3.0%}" for run in (plain, split)),
        )
    console.print(table)
    difference = max(abs(a - b) for a, b in zip(plain.losses, split.losses, strict=True))
    console.print(f"loss {plain.losses[0]:.4f} -> {plain.losses[-1]:.4f} in {len(plain.losses)} iterations")
    console.print(f"largest difference between the two loss curves: {difference:.1e}")
    ratio = plain.seconds_per_iteration / split.seconds_per_iteration
    console.print(
        f"seconds an iteration: {plain.seconds_per_iteration:.2f} | {split.seconds_per_iteration:.2f} "
        f"(plain takes {ratio:.2f} times as long)"
    )
    cores = RANKS if on_gpus else os.cpu_count() or 1
    predictions = [
        f"{predicted:.2f} ({predicted / run.seconds_per_iteration - 1:+.0%})"
        for run in (plain, split)
        for predicted in [run.predicted_seconds(cores)]
    ]
    console.print(f"predicted from their pass times: {' | '.join(predictions)}")
    busiest = [max(map(run.seconds, range(RANKS))) for run in (plain, split)]
    console.print(f"of that the busiest rank computes: {busiest[0]:.2f} | {busiest[1]:.2f}")
    if not on_gpus and (os.cpu_count() or 1) < RANKS:
        console.print(
            f"{RANKS} ranks share {os.cpu_count()} cores here, so an iteration takes as long as all the work together; "
            f"with a device for every rank it takes as long as the busiest one"
        )


def _draw_losses(plain: Run, split: Run, path: Path) -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), height_ratios=(3, 1), sharex=True, layout="constrained")
    iterations = range(1, len(plain.losses) + 1)
    above.plot(iterations, plain.losses, linewidth=4, alpha=0.4, label=plain.title)
    above.plot(iterations, split.losses, linewidth=1.2, color="black", label=f"{split.title} ({ALGORITHM})")
    above.set_ylabel("training loss")
    above.legend()
    below.plot(iterations, [b - a for a, b in zip(plain.losses, split.losses, strict=True)], color="black", linewidth=1)
    below.set_ylabel("difference")
    below.set_xlabel("iteration")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_schedule(split: Run, path: Path) -> None:
    """The schedule with the measured mean times of the passes, for a few microbatches."""
    costs = split.costs()
    schedule = generate("1f1b", RANKS, PICTURE_MICROBATCHES, vocab=split.vocab, costs=costs.nominal(RANKS))
    path.write_bytes(to_picture(simulate(schedule, costs), "png"))


if __name__ == "__main__":
    main()
