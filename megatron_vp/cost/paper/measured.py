"""Reads the iteration time and peak memory of a run that `megatron-vp paper jobs` lists, from the logs of its ranks."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from megatron_vp.cost.memory.rank_memory import GIB
from megatron_vp.files import MIB, read_text

WARM_UP = 3
"""Number of initial iterations that are ignored, because kernels are still being compiled and tuned."""

# Patterns of Megatron's log lines. The last rank prints times, and every rank prints its memory in MiB.
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): ([\d.]+)")
_PEAK = re.compile(r"memory \(MB\) .*\| max allocated: ([\d.]+)")
_OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A run: seconds per iteration (median without warm-up), and peak memory of the fullest rank in GiB.

    `seconds` and `memory` are None if the run ran out of memory; `memory` is also None if no log reports it.
    """

    seconds: float | None
    memory: float | None


def read_run(folder: Path) -> Run | str:
    """Read the run whose ranks logged to FOLDER/rank_*.log, or return the reason why it cannot be used."""
    logs = sorted(folder.glob("rank_*.log"))
    if not logs:
        return "not run"
    peaks: list[float] = []
    times: dict[int, float] = {}
    full = False
    for path in logs:
        text = read_text(path, "log", 1024 * MIB, errors="replace")
        times |= {int(number): float(elapsed) / 1000 for number, elapsed in _ITERATION.findall(text)}
        peaks += [float(peak) * 2**20 / GIB for peak in _PEAK.findall(text)]
        full = full or _OUT_OF_MEMORY.search(text) is not None
    if full:
        return Run(None, None)
    counted = [seconds for number, seconds in times.items() if number > WARM_UP]
    if not counted:
        return f"{logs[-1]} contains no iteration after the {WARM_UP} warm-up iterations"
    return Run(statistics.median(counted), max(peaks, default=0.0) or None)
