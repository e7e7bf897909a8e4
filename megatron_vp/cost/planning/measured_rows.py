"""Assigns vocabulary rows by the GPU speeds that an earlier run of the job measured (`--vocab-shards measured:DIR`).

GPUs of one model differ in speed by a few percent. Rows can even this out, whole layers are too coarse. The layers stay
as in the measured run, and rows are assigned so that all ranks take about the same time per microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from megatron_vp.cost.planning.balanced import unit_of_rows
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.schedule import PassKind
from megatron_vp.trace.rank_reports import RankReport, read_reports

OF_ROWS = (PassKind.S, PassKind.T, PassKind.IF, PassKind.IB)
"""Passes whose time grows with the rank's rows."""
ENOUGH = 5
"""The fewest iterations of a measurement, without the first one of a report."""
IMPLAUSIBLE = 4.0
"""No GPU needs this many times as long for its share of the layers as the median one."""


def measured_rows(
    folder: Path, job: Mapping[str, Any], layers: tuple[int, ...] | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...], float]:
    """The layers by stage and the rows by rank for `job`, and how many times as fast the busiest rank should be.

    `job` has arguments by long name, those that are None are not compared, and `layers` those of a layout that the user
    gave. Raises UserError if the rank reports in `folder` are damaged, too short, or those of another job.
    """
    reports = read_reports(folder)
    rows, tensor = reports[0].vocab_rows, int(reports[0].sizes.get("tensor_model_parallel_size", 1))
    measured = {
        "pipeline_model_parallel_size": len(reports),
        "pipeline_schedule": reports[0].schedule,
        "vocab_parallel_algorithm": reports[0].vocab,
        **reports[0].sizes,
    }
    other = [
        f"{option_of(name)} {value}, but this job has {job[name]}"
        for name, value in measured.items()
        if job.get(name) is not None and job[name] != value
    ]
    if layers not in (None, reports[0].layers):
        other.append(f"{reports[0].layers} layers by stage, but this job has {layers}")
    if other:
        raise UserError(f"--vocab-shards measured:{folder} is from a run with {other[0]}: measure a run of this job")
    if rows is None or len(rows) != len(reports) or min(rows) < 0 or not sum(rows):
        raise UserError(f"{folder} is not from a run with --vocab-parallel: measure one")
    if (iterations := min(len(each.passes) for each in reports)) < ENOUGH:
        raise UserError(f"{folder} has {iterations} measured iterations, but {ENOUGH} are needed (20 are better)")
    of_rows, others = zip(*map(_seconds, reports), strict=True)
    own_layers = reports[0].layers if len(reports[0].layers or ()) == len(rows) else None
    by_layer = [took / (count or 1) for took, count in zip(others, own_layers or (1,) * len(rows), strict=True)]
    for rank, took in enumerate(by_layer):
        if not others[rank] or took > IMPLAUSIBLE * median(by_layer) or bool(of_rows[rank]) != bool(rows[rank]):
            raise UserError(
                f"the times of rank {rank} in {folder} are impossible: its file is damaged, or something else ran on "
                "its GPU; measure again"
            )
    mean = sum(of_rows) / sum(rows)
    by_row = [took / own if own else mean for took, own in zip(of_rows, rows, strict=True)]

    def within(level: float) -> list[float]:
        return [max(0.0, level - own) / each for own, each in zip(others, by_row, strict=True)]

    # The level of which all rows have room, by bisection: `high` is the time of a rank that takes them all.
    low, high = 0.0, max(others) + sum(rows) * max(by_row)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= sum(rows) else (middle, high)
    unit = unit_of_rows(sum(rows), len(rows), tensor) or tensor
    assigned = [unit * int(count // unit) for count in within(high)]
    holders = sorted(range(len(rows)), key=lambda rank: assigned[rank] - within(high)[rank])
    for place in range((sum(rows) - sum(assigned)) // unit):
        assigned[holders[place % len(rows)]] += unit
    assigned[max(rank for rank, count in enumerate(assigned) if count)] += sum(rows) - sum(assigned)
    before, after = (
        max(own + each * count for own, each, count in zip(others, by_row, counts, strict=True))
        for counts in (rows, assigned)
    )
    return reports[0].layers, tuple(assigned), before / after


def _seconds(report: RankReport) -> tuple[float, float]:
    """Seconds per microbatch in passes whose time grows with the rows, and in all others: medians of iterations."""
    by_iteration = [
        (sum(passes.get(kind, 0.0) for kind in OF_ROWS) / count, sum(passes.values()) / count)
        for passes, count in zip(report.passes, report.microbatches, strict=True)
    ]
    of_rows, whole = (median(each) for each in zip(*by_iteration, strict=True))
    return of_rows, whole - of_rows
