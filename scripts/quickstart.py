"""Train one small GPT twice on this machine, plain and with vocabulary parallelism, and compare the two runs.

    scripts/quickstart.sh [--output DIR] [--iterations N]

Four pipeline ranks run on GPUs if the machine has four, otherwise as CPU processes over gloo. The training text is the
source code of the running Python's standard library. All printed and drawn figures are measured in the two runs, except
those that are marked as predictions.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_vp.mcore.platform.flags import quiet_fallback_warnings
from megatron_vp.mcore.storage.dataset import prepare
from megatron_vp.schedule.costs import StageCosts
from megatron_vp.schedule.draw import to_picture
from megatron_vp.schedule.families import generate
from megatron_vp.schedule.passes import VocabMethod
from megatron_vp.schedule.timeline import simulate
from megatron_vp.trace.two_runs import ITERATION, RecordedRun, TwoRuns, picture, read_two_runs

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
VOCABULARY = 16384
ALGORITHM = VocabMethod.VOCAB_2
PICTURE_MICROBATCHES = 8
FEWEST_ITERATIONS = 6
NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

console = Console()


def measured_costs(run: RecordedRun, vocab: VocabMethod) -> StageCosts:
    """The mean seconds of every kind of pass on every rank, for one microbatch."""
    names = ("F", "B", *(("S", "T", "IF", "IB") if vocab.is_sharded else ()))
    means = {
        name: tuple(
            fmean(passes.get(name, 0.0) for passes in rank.passes) / rank.microbatches[-1] for rank in run.ranks
        )
        for name in names
    }
    return StageCosts(**means, W=(0.0,) * RANKS)


def predicted_seconds(run: RecordedRun, vocab: VocabMethod, cores: int) -> float:
    """The seconds of a 1F1B iteration with the run's pass times and free communication, on `cores` cores or devices.

    With fewer cores than ranks, the iteration takes at least as long as the work of all ranks, spread evenly over the
    cores.
    """
    costs = measured_costs(run, vocab)
    schedule = generate("1f1b", RANKS, run.ranks[0].microbatches[-1], vocab=vocab, costs=costs.nominal(RANKS))
    timeline = simulate(schedule, costs)
    return max(timeline.makespan, sum(timeline.busy) / cores)


def standard_library_texts() -> list[tuple[str, str]]:
    """Return the running Python's standard library as (relative path, text) pairs: about 11 million characters that
    need no download. Tests, installed packages and the few files that are not UTF-8 are left out.
    """
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NO_SOURCES.isdisjoint(name.parts):
            with suppress(UnicodeDecodeError, OSError):
                found.append((name.as_posix(), path.read_text(encoding="utf-8")))
    return found


def main() -> None:
    """Prepare the data, train twice, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ROOT / "runs" / "quickstart"
    parser.add_argument("--output", type=Path, default=default, help="folder for data, logs and pictures")
    parser.add_argument("--iterations", type=int, help="number of training iterations (default: as configured)")
    options = parser.parse_args()
    if options.iterations is not None and options.iterations < FEWEST_ITERATIONS:
        parser.error(
            f"--iterations {options.iterations} is too few, because the learning rate warms up first; give at least "
            f"{FEWEST_ITERATIONS}"
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
    plain, split = output / "plain", output / ALGORITHM
    _train("plain Megatron", plain, extra)
    _train("vocabulary parallel", split, [*extra, "--vocab-parallel", "--vocab-shards=even"])
    console.print(f"[bold]3/3 comparison[/]: megatron-vp report {plain} {split}")
    runs = read_two_runs(plain, split)
    _say(runs.text())
    _print_predictions(runs, on_gpus)
    (output / "report.png").write_bytes(picture(runs))
    _draw_schedule(runs.split, output / "schedule.png")
    _say(f"pictures: {output / 'report.png'}, {output / 'schedule.png'}")
    console.print(f"done in {time.monotonic() - started:.0f} s; logs in {output / 'plain'} and {output / ALGORITHM}")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _data(folder: Path) -> tuple[Path, Path]:
    prepared = prepare(standard_library_texts(), folder, vocab_size=VOCABULARY, overwrite=True)
    return prepared.tokenizer, prepared.dataset


def _say(text: str) -> None:
    """Print a text unchanged, without rich's colors and line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _train(title: str, folder: Path, extra: list[str]) -> None:
    """Train one run under torchrun; if it fails, print its last lines and exit."""
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


def _print_predictions(runs: TwoRuns, on_gpus: bool) -> None:
    cores = RANKS if on_gpus else os.cpu_count() or 1
    predictions = [
        f"{predicted:.2f} ({predicted / run.iteration_seconds - 1:+.0%})"
        for run, vocab in ((runs.plain, VocabMethod.NONE), (runs.split, ALGORITHM))
        for predicted in [predicted_seconds(run, vocab, cores)]
    ]
    _say(f"predicted from the runs' pass times: {' | '.join(predictions)}")
    if not on_gpus and (os.cpu_count() or 1) < RANKS:
        _say(
            f"{RANKS} ranks share {os.cpu_count()} cores here, so an iteration takes as long as the work of all ranks; "
            f"with one device per rank, it would take as long as the work of the busiest rank"
        )


def _draw_schedule(split: RecordedRun, path: Path) -> None:
    """Draw the schedule with the measured mean times of the passes, for a few microbatches."""
    costs = measured_costs(split, ALGORITHM)
    schedule = generate("1f1b", RANKS, PICTURE_MICROBATCHES, vocab=ALGORITHM, costs=costs.nominal(RANKS))
    path.write_bytes(to_picture(simulate(schedule, costs), "png"))


if __name__ == "__main__":
    main()
