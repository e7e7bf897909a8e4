"""Assigns vocabulary rows for a job's next start, based on the GPU speeds that were measured in an earlier run.

GPUs of the same model differ in speed by a few percent. Moving rows can compensate for this; moving whole layers is too
coarse. The earlier run's rank reports say how long each rank computes per microbatch, and how many rows it
has. Rows are then assigned so that all ranks take about the same time (`layer_division.fill`).

Files that may be wrong are refused: a report that is damaged, belongs to another run or covers too few iterations would
put rows on the wrong ranks, and no later check would detect the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.cost.planning.balanced import Shards, unit_of_rows
from megatron_vp.cost.planning.layer_division import fill
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.schedule import PassKind
from megatron_vp.trace.partition import VOCABULARY, Partition
from megatron_vp.trace.rank_files import path_of
from megatron_vp.trace.rank_reports import RankReport, read_reports

CERTAIN = 2.0
"""A gain of less than this many standard deviations is not significant."""

ROW_KINDS = (PassKind.S, PassKind.T, PassKind.IF, PassKind.IB)
"""Kinds of passes whose time grows with the number of vocabulary rows on the rank."""

ENOUGH = 5
"""The fewest iterations that a measurement needs, not counting the first iteration of a report, which is warm-up."""

OF_MEDIAN = 1.25 * 1.4826
"""Standard deviation of the median of n normal samples, in units of their median absolute deviation / sqrt(n)."""

IMPLAUSIBLE = 4.0
"""A measurement is refused if any rank's time per layer is more than this many times the median of all ranks."""

Seconds = Mapping[str, float]
"""A rank's computing time per microbatch in seconds, by kind of pass, summed over its chunks."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run: pass times of every pipeline rank (medians over iterations), and properties of the job.

    uncertainty: relative standard deviation of the median time per microbatch, for the rank where it is largest.
    """

    seconds: tuple[Seconds, ...]
    partition: Partition
    schedule: str
    vocab: str
    iterations: int
    uncertainty: float

    @property
    def rows(self) -> tuple[int, ...]:
        """Vocabulary rows of every pipeline rank, summed over its tensor ranks."""
        return self.partition.vocab_rows or ()


def read_run(folder: Path) -> MeasuredRun:
    """Read the pass times that a run wrote to `folder` with --rank-report.

    Raises UserError if files are missing, come from several runs or from a run without vocabulary shards, cover too few
    iterations, or contain impossible values.
    """
    reports = read_reports(folder)
    times = [
        [
            {kind: took / count for kind, took in passes.items()}
            for passes, count in zip(each.passes, each.microbatches, strict=True)
        ]
        for each in reports
    ]
    seconds = tuple(
        {kind: median(one.get(kind, 0.0) for one in own) for kind in sorted({kind for one in own for kind in one})}
        for own in times
    )
    for fault in _faults(folder, reports, seconds):
        raise UserError(fault)
    uncertainty = max(_uncertainty([sum(one.values()) for one in own]) for own in times)
    run = reports[0]
    return MeasuredRun(seconds, run.partition, run.schedule, run.vocab, min(map(len, times)), uncertainty)


def _faults(folder: Path, reports: Sequence[RankReport], seconds: Sequence[Seconds]) -> Iterator[str]:
    """What is wrong with the reports as a measurement; the first fault may cause the others."""
    partition = reports[0].partition
    rows, layers, sizes = partition.vocab_rows, partition.layers, dict(partition.sizes)
    if rows is None:
        yield f"{folder} is from a run without vocabulary shards: measure a run with --vocab-parallel"
        return
    vocab, damaged = sizes.get(VOCABULARY), "the files are damaged; measure again"
    if vocab is None or partition.tensor < 1 or any(size < 1 for size in sizes.values()):
        yield f"{folder} does not record valid model and batch sizes: measure again with this version of megatron_vp"
    if len(rows) != len(reports) or min(rows) < 0 or sum(rows) != vocab:
        yield (
            f"{folder} records {','.join(map(str, rows))} vocabulary rows per rank, which do not add up to the "
            f"vocabulary size {vocab}: {damaged}"
        )
    if layers is not None and (min(layers, default=-1) < 0 or sizes.get("num_layers") not in (None, sum(layers))):
        yield (
            f"{folder} records {','.join(map(str, layers))} layers per stage, which do not add up to the "
            f"{sizes['num_layers']} layers of the run: {damaged}"
        )
    iterations = min(len(each.passes) for each in reports)
    for each in reports:
        path = path_of(folder, each.rank)
        if len(each.passes) > iterations + 1:
            yield (
                f"{path} has {len(each.passes)} measured iterations, but another rank's file has {iterations}: the run "
                "ended early, or a file is incomplete; measure again"
            )
        if each.microbatches[:iterations] != reports[0].microbatches[:iterations]:
            yield (
                f"{folder}: ranks 0 and {each.rank} recorded different numbers of microbatches for the same iteration; "
                "repeat the measurement with an empty folder"
            )
        needed = [(PassKind.F,), (PassKind.B, PassKind.BW), *[(PassKind.S,), (PassKind.T,)] * (rows[each.rank] > 0)]
        for kinds in needed:
            if not all(sum(one.get(kind, 0.0) for kind in kinds) for one in each.passes):
                yield (
                    f"{path} has an iteration without times of {kinds[0]} passes: the file is damaged; measure again "
                    "with --vocab-parallel"
                )
    if iterations < ENOUGH:
        yield (
            f"{folder} has {iterations} measured iterations, but at least {ENOUGH} are needed (20 are better): train "
            f"at least {ENOUGH + 1} iterations with --rank-report"
        )
    by_layer = [
        sum(took for kind, took in own.items() if kind not in ROW_KINDS) / layers_on(partition, rank, len(reports))
        for rank, own in enumerate(seconds)
    ]
    usual = median(by_layer)
    for rank, took in enumerate(by_layer):
        if took > IMPLAUSIBLE * usual:
            yield (
                f"the rank that wrote {path_of(folder, rank)} took {took / usual:.1f} times as long per layer as the "
                "median rank, but GPUs do not differ that much: check what else ran on the slow rank's GPU, and "
                "measure again"
            )


def layers_on(partition: Partition, rank: int, ranks: int) -> float:
    """The number of layers on `rank`, used to compare ranks by their time per layer.

    Returns 1 if the layout is unknown or even, if ranks have several chunks, or if the rank has no layers.
    """
    if partition.layers is None or len(partition.layers) != ranks:
        return 1.0
    return partition.layers[rank] or 1.0


def _uncertainty(times: Sequence[float]) -> float:
    """Relative standard deviation of the median of `times`, robust against single slow iterations."""
    middle = median(times)
    return OF_MEDIAN * median(abs(each - middle) for each in times) / math.sqrt(len(times)) / middle


@dataclass(frozen=True)
class MeasuredJob:
    """The properties of a job that must match the measured run.

    ranks, tensor: numbers of pipeline and tensor ranks.
    vocab: size of the padded vocabulary; None: not known yet.
    arguments: the job's arguments by long name; arguments that are None or missing are not compared.
    layers: layers of every virtual stage, if the user set the layout with the option `layout_option`.
    """

    ranks: int
    tensor: int
    vocab: int | None
    schedule: str
    method: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    layout_option: str = ""

    def check(self, folder: Path, run: MeasuredRun) -> None:
        """Raise UserError if `run`, read from `folder`, does not match this job."""
        partition, there = run.partition, dict(run.partition.sizes)
        compared: list[tuple[str, object, object]] = [
            ("pipeline ranks", len(run.rows), self.ranks),
            ("tensor ranks", partition.tensor, self.tensor),
            ("vocabulary rows", sum(run.rows), sum(run.rows) if self.vocab is None else self.vocab),
            ("--pipeline-schedule", run.schedule, self.schedule),
            ("--vocab-parallel-algorithm", run.vocab, self.method),
        ]
        for name, size in there.items():
            here = self.arguments.get(name)
            if here is not None and name != VOCABULARY:
                compared.append((option_of(name), size, here))
        for what, measured, here in compared:
            if measured != here:
                said = f"{what} {measured}" if what.startswith("--") else f"{measured} {what}"
                raise UserError(
                    f"--vocab-shards measured:{folder} is from a run with {said}, but this job has {here}: measure a "
                    "run of this job"
                )
        if self.layers is not None and partition.layers is not None and self.layers != partition.layers:
            raise UserError(
                f"--vocab-shards measured:{folder} is from a run with the layers {list(partition.layers)}, but "
                f"{self.layout_option} gives {list(self.layers)}: measure a run with this layout, or remove the layout "
                "(or the pattern's bars)"
            )


def next_rows(folder: Path, job: MeasuredJob, room: Callable[[Partition], Sequence[int] | None]) -> Shards:
    """Compute the shards that `--vocab-shards measured:FOLDER` gives to `job`. The layers stay as in the measured run.

    `room` takes the run's partition and returns how many rows fit into each pipeline rank's memory, or None if that is
    unknown. Raises UserError if the run does not match `job`, or if `read_run` or `refilled` raises it.
    """
    run = read_run(folder)
    job.check(folder, run)
    return refilled(run.partition, run.seconds, room(run.partition))


def refilled(partition: Partition, pass_seconds: Sequence[Seconds], most: Sequence[int] | None = None) -> Shards:
    """Compute the next run's vocabulary rows from the pass times of a run with `partition`. The layers stay the same.

    Args:
        pass_seconds: pass times of every pipeline rank.
        most: the most rows that fit into each rank's memory (see `balanced.most_rows`); None: no limit.

    The returned `gain` is the busiest rank's time per microbatch with the old rows, divided by that with the new rows.
    Each row is assumed to take its rank's measured mean time per row. For a rank without rows, this mean is estimated
    from how fast the rank computed its layers, compared with the ranks that had rows. Raises UserError if the run's
    vocabulary passes took no time, or if the rows do not fit into memory.
    """
    rows = partition.vocab_rows
    assert rows is not None
    vocab = sum(rows)
    unit = unit_of_rows(vocab, len(rows), partition.tensor) or partition.tensor
    of_rows = [sum(each.get(kind, 0.0) for kind in ROW_KINDS) for each in pass_seconds]
    others = [sum(took for kind, took in each.items() if kind not in ROW_KINDS) for each in pass_seconds]
    holders = [rank for rank, own in enumerate(rows) if own]
    if not sum(of_rows):
        raise UserError("the measured run spent no time in vocabulary passes: measure a run with --vocab-parallel")
    by_row = {rank: of_rows[rank] / rows[rank] for rank in holders}
    mean = fmean(by_row.values())
    usual = fmean(others[rank] / layers_on(partition, rank, len(rows)) for rank in holders)
    per_row = [
        by_row.get(rank, mean * others[rank] / layers_on(partition, rank, len(rows)) / usual if usual else mean)
        for rank in range(len(rows))
    ]
    units = vocab // unit
    cost = [mean * unit * count for count in range(units + 1)]
    limits = [units if most is None else most[rank] // unit for rank in range(len(rows))]
    filled = fill(others, cost, limits, [max(each, 1e-9 * mean) / mean for each in per_row])
    if filled is None:
        raise UserError("the vocabulary does not fit into the combined memory of all ranks: use more ranks")
    assigned = [unit * count for count in filled]
    assigned[max(rank for rank, count in enumerate(filled) if count)] += vocab % unit
    before = max(own + more for own, more in zip(others, of_rows, strict=True))
    after = max(own + each * count for own, each, count in zip(others, per_row, assigned, strict=True))
    return Shards(partition.layers, tuple(assigned), before / after)


def next_start(folder: Path, run: MeasuredRun, predicted: float | None = None) -> str:
    """Describe in one line what `--vocab-shards measured:FOLDER` would change at the next start.

    `predicted` is the speed-up that the cost model predicts for this change. If it is well below 1, the line warns
    against the change.
    """
    found = refilled(run.partition, run.seconds)
    assert found.rows is not None
    busiest = max(sum(each.values()) for each in run.seconds)
    spread = f"the median pass times of {run.iterations} iterations are accurate to {100 * run.uncertainty:.2g} %"
    rows = ",".join(map(str, found.rows))
    start = f"the next start with --vocab-shards measured:{folder} would set the vocabulary rows per rank to {rows}; "
    if found.gain - 1 <= CERTAIN * run.uncertainty:
        return (
            f"{start}the speed would not change significantly ({spread}); measure more iterations, on GPUs that no "
            "other job uses"
        )
    line = (
        f"{start}the busiest rank would compute for {1e3 * busiest / found.gain:.2f} ms per microbatch instead "
        f"of {1e3 * busiest:.2f} ms ({spread})"
    )
    if predicted is not None and predicted < 1 - ERROR_BAND["time"]:
        return (
            f"{line}, but the cost model, which assumes GPUs of equal speed, predicts that iterations would take "
            f"{1 / predicted:.2f} times as long as in the measured run: measure again before you use these rows"
        )
    return f"{line}, so this rank would be {found.gain:.3f} times as fast"
