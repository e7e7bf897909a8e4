"""How the benchmarks take the time of one call and write down what they found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """One call, by device events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def write(line: dict, output: Path | None) -> None:
    """Print a line of JSON, and append it to a file where there is one: what is done stays when the rest is cut off."""
    text = json.dumps(line)
    print(text, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(text + "\n")
