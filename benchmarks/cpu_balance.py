"""Measure with real computation on two cores how much of a perfectly balanced pipeline's speed-up vocab-2 reaches.

    python benchmarks/cpu_balance.py [--rounds 3] [--iterations 6] [--output FILE.jsonl]

Two ranks with one core and one thread each train a model whose output layer costs about as much as its transformer
layers. Plain Megatron and vocab-2 train in turns. Times come from `--rank-report` and leave out the optimizer. They are
medians over all iterations but the first of each training.

    measured speed-up   the time of plain Megatron's iteration, divided by that of vocab-2
    perfect speed-up    the time that the simulator gives for plain Megatron's pass times, divided by the time for the
                        same work shared evenly by all ranks; communication is free in both

`of_perfect` in the last line is the measured speed-up divided by the perfect one. Run this on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

import torch

from megatron_vp.schedule import StageCosts, generate, simulate

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
ON_A_CORE_OF_ITS_OWN = 'exec taskset --cpu-list $LOCAL_RANK "$0" "$@"'
"""Binds each rank to a core, as if it had its own device: a rank that waits does not lend its core to the other."""
MODEL = {
    "num-layers": 4,
    "hidden-size": 256,
    "num-attention-heads": 4,
    "seq-length": 256,
    "max-position-embeddings": 256,
    "vocab-size": 8191,
    "micro-batch-size": 2,
    "global-batch-size": 24,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "lr": 1e-4,
    "lr-decay-style": "constant",
    "tokenizer-type": "NullTokenizer",
    "num-workers": 0,
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1000,
    "pipeline-model-parallel-size": RANKS,
}


def train(flags: list[str], iterations: int) -> list[dict]:
    """Run one training in separate processes, and return the ranks' reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
            *("--no-python", "bash", "-c", ON_A_CORE_OF_ITS_OWN, sys.executable),
            *(str(ROOT / "pretrain_gpt_vp.py"), "--cpu", "--mock-data", "--untie-embeddings-and-output-weights"),
            *(f"--{name}={value}" for name, value in MODEL.items()),
            *(f"--train-iters={iterations}", f"--rank-report={folder}", *flags),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"training with {flags} failed:\n{done.stderr[-2000:]}")
        return [json.loads((Path(folder) / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


def iteration_seconds(reports: list[dict]) -> list[float]:
    """The seconds of every iteration but the first, on the slowest rank."""
    times = zip(*(report["iteration_milliseconds"][1:] for report in reports), strict=True)
    return [max(ranks) / 1000 for ranks in times]


def perfect_speed_up(reports: list[dict]) -> float:
    """The perfect speed-up for plain Megatron's pass times: the simulated time over that with evenly spread work."""
    microbatches = reports[0]["microbatches"]
    forward, backward = (
        [fmean(times[kind] for times in report["pass_milliseconds_by_iteration"][1:]) for report in reports]
        for kind in ("F", "B")
    )
    schedule = generate("1f1b", RANKS, microbatches)

    def makespan(forward: list[float], backward: list[float]) -> float:
        return simulate(schedule, StageCosts(tuple(forward), tuple(backward), (0.0,) * RANKS)).makespan

    return makespan(forward, backward) / makespan([fmean(forward)] * RANKS, [fmean(backward)] * RANKS)


def main() -> None:
    """Train in turns, and print or append to a file one line of JSON per round, and one for the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    lines, plain_times, split_times, perfect = [], [], [], []
    for _ in range(args.rounds):
        plain, split = train([], args.iterations), train(["--vocab-parallel", "--vocab-shards=even"], args.iterations)
        plain_times += iteration_seconds(plain)
        split_times += iteration_seconds(split)
        perfect.append(perfect_speed_up(plain))
        lines.append(_line(iteration_seconds(plain), iteration_seconds(split), perfect[-1:]))
        print(json.dumps(lines[-1]), flush=True)
    lines.append(_line(plain_times, split_times, perfect) | {"rounds": args.rounds, "iterations": args.iterations})
    print(json.dumps(lines[-1]))
    if args.output is not None:
        with args.output.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def _line(plain: list[float], split: list[float], perfect: list[float]) -> dict:
    measured = median(plain) / median(split)
    return {
        "plain_s": round(median(plain), 4),
        "vocab_2_s": round(median(split), 4),
        "measured_speed_up": round(measured, 4),
        "perfect_speed_up": round(median(perfect), 4),
        "of_perfect": round(measured / median(perfect), 4),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
