"""Compares a plain and a vocabulary-parallel run of the same job: each rank's time and memory, and the losses.

Times, parameters and memory come from the rank reports (`--rank-report`), and losses from Megatron's log.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError, printable
from megatron_vp.files import MIB, read_text
from megatron_vp.schedule.draw import aligned, saved
from megatron_vp.trace.rank_reports import RankReport, read_reports

LOG_SUFFIXES = (".txt", ".log", ".out")
LONGEST_LOG = 1024 * MIB
ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) .*?lm loss: (\S+)")
"""Matches the iteration, the job's number of iterations and the mean training loss in a line of Megatron's log."""
_SHOWN = (
    *("iteration_seconds", "busy_seconds", "waiting_seconds", "peak_memory_bytes", "peak_microbatches_in_flight"),
    "parameters",
)
GIB = 2**30


@dataclass(frozen=True)
class RecordedRun:
    """One run: its reports by pipeline rank, and its training losses by iteration."""

    ranks: tuple[RankReport, ...]
    losses: dict[int, float]

    @property
    def iteration_seconds(self) -> float:
        """Seconds that an iteration's passes take on the slowest rank, averaged over the iterations."""
        return max(rank.iteration_seconds for rank in self.ranks)

    def document(self) -> dict[str, Any]:
        """The run as a JSON object; lists are indexed by rank, except `iterations` and their `losses`."""
        by_rank = {name: [getattr(rank, name) for rank in self.ranks] for name in _SHOWN}
        return by_rank | {"iterations": list(self.losses), "losses": list(self.losses.values())}


@dataclass(frozen=True)
class TwoRuns:
    """A plain run and a vocabulary-parallel run of one job, with the same number of pipeline ranks."""

    plain: RecordedRun
    split: RecordedRun

    def __post_init__(self) -> None:
        """Raise UserError if the runs are of different jobs, are swapped, or have no iteration in common."""
        plain, split = (run.ranks[0].vocab != "none" for run in (self.plain, self.split))
        if plain and not split:
            raise UserError("the first run has vocabulary shards and the second has none: give the plain run first")
        first, second = self.plain.ranks[0], self.split.ranks[0]
        for what, before, after in (
            ("pipeline ranks", len(self.plain.ranks), len(self.split.ranks)),
            ("microbatches per iteration", first.microbatches[-1], second.microbatches[-1]),
            ("--log-interval", first.log_interval, second.log_interval),
            *((name, size, second.sizes.get(name, size)) for name, size in first.sizes.items()),
        ):
            if before != after:
                raise UserError(f"the runs differ in {what} ({before} and {after}): give two runs of the same job")
        if not self.differences:
            raise UserError(
                f"the logs have no iteration in common (the first has iterations {_extent(self.plain)}, the second has "
                f"{_extent(self.split)}): give two runs of the same job with the same --log-interval"
            )

    @cached_property
    def differences(self) -> dict[int, float]:
        """Relative difference of the losses, (vocabulary parallel - plain) / plain, for each iteration in both logs."""
        plain, split = self.plain.losses, self.split.losses
        return {each: (split[each] - plain[each]) / abs(plain[each]) for each in sorted(plain.keys() & split.keys())}

    @property
    def largest_loss_difference(self) -> tuple[int, float]:
        """The iteration with the largest relative difference, and the absolute value of that difference."""
        return max(((each, abs(by)) for each, by in self.differences.items()), key=itemgetter(1))

    def document(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {
            "plain": self.plain.document(),
            "vocabulary_parallel": self.split.document(),
            "largest_loss_difference": self.largest_loss_difference[1],
        }

    def text(self) -> str:
        """The comparison as `megatron-vp report` prints it; in each pair of values, the plain run's comes first."""
        plain, split, common = self.plain, self.split, list(self.differences)
        busiest = [max(rank.busy_seconds for rank in run.ranks) for run in (plain, split)]
        before, after = plain.iteration_seconds, split.iteration_seconds
        faster, slower = ("vocabulary parallel", "plain") if after < before else ("plain", "vocabulary parallel")
        iteration, largest = self.largest_loss_difference
        return "\n".join(
            [
                "plain | vocabulary parallel",
                "",
                *_table(plain, split),
                "",
                f"seconds per iteration: {_seconds(before)} | {_seconds(after)} "
                f"({slower} takes {max(before, after) / min(before, after):.2f} times as long as {faster})",
                f"busiest rank's computing time per iteration: {_seconds(busiest[0])} s | {_seconds(busiest[1])} s",
                f"loss of the plain run: {plain.losses[common[0]]:.4f} in iteration {common[0]}, "
                f"{plain.losses[common[-1]]:.4f} in iteration {common[-1]}",
                f"largest relative difference between the two loss curves: {largest:.1e}, in iteration {iteration} "
                f"({len(common)} iterations compared)",
            ]
        )


def picture(runs: TwoRuns) -> bytes:
    """Draw a PNG of both runs: the losses with their relative difference, and each rank's busy and waiting time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplot_mosaic([["losses", "bars"], ["below", "bars"]], width_ratios=(3, 2), height_ratios=(3, 1))
    losses, bars, below = axes["losses"], axes["bars"], axes["below"]
    both = (runs.plain, "plain", "C0", 4.0), (runs.split, "vocabulary parallel", "0.2", 1.2)
    for place, (run, name, color, width) in enumerate(both):
        losses.plot(list(run.losses), list(run.losses.values()), label=name, linewidth=width, color=color)
        places = [rank + 0.4 * place - 0.2 for rank in range(len(run.ranks))]
        busy, waits = ([getattr(rank, f"{what}_seconds") for rank in run.ranks] for what in ("busy", "waiting"))
        bars.bar(places, busy, 0.4, color=color, label=f"{name}: computes")
        bars.bar(places, waits, 0.4, bottom=busy, color=color, alpha=0.25, label=f"{name}: waits")
    below.plot(list(runs.differences), list(runs.differences.values()), color="black", linewidth=1)
    below.sharex(losses)
    below.set(xlabel="iteration", ylabel="relative\ndifference")
    losses.set(ylabel="training loss")
    losses.legend()
    highest = 1.3 * max(run.iteration_seconds for run, *_ in both)
    bars.set(xlabel="pipeline rank", ylabel="seconds per iteration", xticks=range(len(runs.plain.ranks)))
    bars.set(ylim=(0, highest))
    bars.legend(ncols=2, fontsize="x-small", loc="upper center")
    return saved(figure)


def read_two_runs(plain: Path, split: Path, logs: tuple[Path, Path] | None = None) -> TwoRuns:
    """Read two runs from the folders of their rank reports.

    logs: Megatron's log of each run; None means the only log in each folder.

    Raises UserError if a report or log is missing, invalid or ambiguous, or if `TwoRuns` refuses the runs.
    """
    reports = read_reports(plain), read_reports(split)
    logs = logs or (_log_in(plain), _log_in(split))
    losses = (read_losses(log, ranks[0].log_interval) for log, ranks in zip(logs, reports, strict=True))
    return TwoRuns(*map(RecordedRun, map(tuple, reports), losses))


def read_losses(log: Path, interval: int = 1) -> dict[int, float]:
    """Training losses by iteration, from Megatron's log; if a resumed run repeats an iteration, the last loss counts.

    interval: the run's --log-interval. Megatron also logs the first iteration after a start. The next loss is the mean
        since the start, and is left out if it covers less than an interval.

    Raises UserError for a log without losses, and for a loss that is not a finite number.
    """
    losses: dict[int, float] = {}
    last, before = sys.maxsize, 0  # the iteration of the last line, and the one before the first that a line covers
    for number, _, text in ITERATION.findall(read_text(log, "log", LONGEST_LOG, errors="replace")):
        iteration = int(number)
        if iteration <= last or iteration % interval:  # the first iteration after a start
            before = iteration - 1
        whole = iteration - before >= interval or iteration % interval
        # Megatron keeps the loss of a first iteration within an interval for the mean of that interval.
        last, before = iteration, before if iteration % interval else iteration
        try:
            loss = float(text)
        except ValueError:
            loss = math.nan
        if not math.isfinite(loss):
            raise UserError(
                f"the loss of iteration {iteration} in {log} is {printable(text, 40)}: give two runs whose losses are "
                "finite"
            )
        if whole and loss:  # 0 stands for a mean over skipped iterations alone
            losses[iteration] = loss
    if not losses:
        raise UserError(
            f"{log} contains no line with 'iteration' and 'lm loss': give --logs two files with Megatron's output"
        )
    return dict(sorted(losses.items()))


def _log_in(folder: Path) -> Path:
    """The only file in `folder` that looks like a log with losses."""
    candidates = [path for path in sorted(folder.glob("*")) if path.suffix in LOG_SUFFIXES and path.is_file()]
    found = [path for path in candidates if ITERATION.search(read_text(path, "log", LONGEST_LOG, errors="replace"))]
    if len(found) != 1:
        what = f"several logs ({', '.join(path.name for path in found)})" if found else "no log with losses"
        raise UserError(f"{folder} contains {what}: name the logs of both runs with --logs PLAIN_LOG VP_LOG")
    return found[0]


def _table(plain: RecordedRun, split: RecordedRun) -> list[str]:
    """Format a table with one line per rank; peak memory is shown only if both runs measured it, on GPUs."""
    columns: list[tuple[str, Callable[[RankReport], str]]] = [
        ("parameters", lambda rank: f"{rank.parameters:,}"),
        ("in flight", lambda rank: f"{rank.peak_microbatches_in_flight:g}"),
        ("computes s", lambda rank: f"{_seconds(rank.busy_seconds)} {rank.busy_seconds / rank.iteration_seconds:4.0%}"),
        ("waits s", lambda rank: _seconds(rank.waiting_seconds)),
    ]
    if plain.ranks[0].peak_memory_bytes and split.ranks[0].peak_memory_bytes:
        columns.append(("peak GiB", lambda rank: f"{(rank.peak_memory_bytes or 0) / GIB:.2f}"))
    rows = [["rank", *(title for title, _ in columns)]]
    for number, pair in enumerate(zip(plain.ranks, split.ranks, strict=True)):
        rows.append([str(number), *(" | ".join(map(show, pair)) for _, show in columns)])
    return aligned(rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:#.3g}".removesuffix(".")


def _extent(run: RecordedRun) -> str:
    return f"{min(run.losses)} to {max(run.losses)}"
