"""Helpers for the benchmarks, which parse sizes, time calls, and write results."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import torch

EVICTING_BYTES = 2**30
"""The bytes that are written before every timed call: 20 times the L2 of an H100, so that inputs come from memory."""

CLEANING_BYTES = 2**28
"""The bytes that are read after that, so that L2 holds lines that need not be written back. Otherwise the first timed
kernel would pay for up to 50 MB of other writes.
"""

SUSTAINED_SECONDS = 0.3

HEAD_START_CYCLES = 4_000_000
"""The cycles for which the device then spins, about 2 ms, so that the host can issue the kernels ahead, as in a run."""


def milliseconds(work: Callable[[], object], device: torch.device, *, dirty: bool = False) -> float:
    """The milliseconds of one call, measured with device events on a GPU.

    On a GPU the host gets a head start, so the time does not include launches, and the inputs are no longer in L2. With
    `dirty`, L2 is full of lines that must be written back first. In a real run, L2 holds both clean and dirty lines.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _elsewhere(device).zero_()
    if not dirty:
        _elsewhere(device)[:CLEANING_BYTES].view(torch.int32).sum()
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def times(
    works: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    *,
    dirty: bool = False,
    before: dict[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Return the milliseconds of each function in every round. The functions run in turns, after two warm-up rounds.

    `before` prepares some of the functions, for example those that change their input; its calls are not timed.
    """
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, work in works.items():
            if before and name in before:
                before[name]()
            found[name].append(milliseconds(work, device, dirty=dirty))
    return {name: values[2:] for name, values in found.items()}


def sustained(work: Callable[[], object], device: torch.device) -> float:
    """The milliseconds of a call among many that follow each other without a pause, for `SUSTAINED_SECONDS`.

    The device then runs at the clock that it sustains under load; a single call after a pause, as in `milliseconds`,
    may run at a higher clock. Inputs that fit L2 may still be there from the previous call.
    """
    calls = max(3, int(1e3 * SUSTAINED_SECONDS / milliseconds(work, device)) if device.type == "cuda" else 3)

    def many() -> None:
        for _ in range(calls):
            work()

    for _ in range(2):  # the first loop lowers the clock
        took = milliseconds(many, device)
    return took / calls


def medians(
    works: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    before: dict[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """The median milliseconds of each function. The functions run in turns."""
    return {name: statistics.median(values) for name, values in times(works, rounds, device, before=before).items()}


def spread(values: list[float]) -> tuple[float, float]:
    """The first and last decile of some values, or their minimum and maximum if there are fewer than three."""
    if len(values) < 3:
        return min(values), max(values)
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def copy_bandwidth(size: int, device: torch.device, rounds: int = 10) -> float:
    """The bytes per second that a copy of `size` bytes reads and writes, the limit for kernels that move as much."""
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / medians({"copy": lambda: target.copy_(source)}, rounds, device)["copy"]


def device_state(device: torch.device) -> dict[str, str] | None:
    """Clock, power and throttle reasons from nvidia-smi; None without a GPU or without the tool."""
    names = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(names, (each.strip() for each in said.split(",")), strict=False))


@cache
def _elsewhere(device: torch.device) -> torch.Tensor:
    return torch.empty(EVICTING_BYTES, dtype=torch.uint8, device=device)


def add_sizes(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Add options for comma-separated sizes."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default, help=f"comma-separated (default {default})")


def sizes(args: argparse.Namespace, *names: str) -> Iterator[tuple[int, ...]]:
    """Every combination of the sizes that were given."""
    return product(*([int(value) for value in getattr(args, name).split(",")] for name in names))


def write(line: dict, output: Path | None) -> None:
    """Print a line of JSON, and append it to `output` if given, so that results survive if the rest is interrupted."""
    text = json.dumps({"benchmark": Path(sys.argv[0]).stem} | line)
    print(text, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(text + "\n")
