"""How the benchmarks take sizes, take the time of one call and write down what they found."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import torch

HEAD_START_BYTES = 2**30
"""Written before every timed call: about 0.3 ms on a device of 3 TB/s, and 20 times its L2."""


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """One call, by device events on a GPU.

    There the host gets a head start, as it has in a run: it issues the call's kernels while the device still writes
    elsewhere, so the time is the device's and not that of launches. The inputs have left L2 by then.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _elsewhere(device).zero_()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def medians(works: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each, in turns, after two rounds that warm up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, work in works.items():
            times[name].append(milliseconds(work, device))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


@cache
def _elsewhere(device: torch.device) -> torch.Tensor:
    return torch.empty(HEAD_START_BYTES, dtype=torch.uint8, device=device)


def add_sizes(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Options for comma-separated sizes."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default, help=f"comma-separated (default {default})")


def sizes(args: argparse.Namespace, *names: str) -> Iterator[tuple[int, ...]]:
    """Every combination of the sizes that were given."""
    return product(*([int(value) for value in getattr(args, name).split(",")] for name in names))


def write(line: dict, output: Path | None) -> None:
    """Print a line of JSON, and append it to a file where there is one: what is done stays when the rest is cut off."""
    text = json.dumps({"benchmark": Path(sys.argv[0]).stem} | line)
    print(text, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(text + "\n")
