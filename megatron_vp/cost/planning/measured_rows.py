"""Assigns vocabulary rows for a job's next start, based on the GPU speeds that were measured in an earlier run.

GPUs of the same model differ in speed by a few percent. Moving rows can compensate for this; moving whole layers is too
coarse. The earlier run's rank reports say how long each rank computes per microbatch, and how many rows it has. Rows
are then assigned so that all ranks take about the same time (`layer_division.fill`).

A report that is damaged, belongs to another run or covers too few iterations is refused: it would put rows on the wrong
ranks, and no later check would detect the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from megatron_vp.cost.planning.balanced import Shards, unit_of_rows
from megatron_vp.cost.planning.layer_division import fill
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.schedule import PassKind
from megatron_vp.trace.partition import VOCABULARY, Partition
from megatron_vp.trace.rank_files import path_of
from megatron_vp.trace.rank_reports import read_reports

ROW_KINDS = (PassKind.S, PassKind.T, PassKind.IF, PassKind.IB)
"""Kinds of passes whose time grows with the number of vocabulary rows on the rank."""

ENOUGH = 5
"""The fewest iterations that a measurement needs, not counting the first iteration of a report, which is warm-up."""

IMPLAUSIBLE = 4.0
"""A measurement is refused if any rank's time per layer is more than this many times the median of all ranks."""

Seconds = Mapping[str, float]
"""A rank's computing time per microbatch in seconds, by kind of pass, summed over its chunks."""


@dataclass(frozen=True)
class MeasuredRun:
    """Pass times of every pipeline rank of a run (medians over iterations), and properties of its job."""

    seconds: tuple[Seconds, ...]
    partition: Partition
    schedule: str
    vocab: str

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
    run, iterations = reports[0], min(len(each.passes) for each in reports)
    rows, vocab = run.partition.vocab_rows, dict(run.partition.sizes).get(VOCABULARY)
    if rows is None:
        raise UserError(f"{folder} is from a run without vocabulary shards: measure a run with --vocab-parallel")
    if len(rows) != len(reports) or min(rows) < 0 or sum(rows) != vocab or run.partition.tensor < 1:
        raise UserError(
            f"{folder} records {','.join(map(str, rows))} vocabulary rows per rank, which do not add up to the "
            f"vocabulary size {vocab}: the files are damaged; measure again"
        )
    if iterations < ENOUGH:
        raise UserError(
            f"{folder} has {iterations} measured iterations, but at least {ENOUGH} are needed (20 are better): train "
            f"at least {ENOUGH + 1} iterations with --rank-report"
        )
    seconds: list[Seconds] = []
    for each, own in zip(reports, rows, strict=True):
        for kinds in ("F", ("B", "BW"), *(("S", "T") if own else ())):
            if not all(sum(one.get(kind, 0.0) for kind in kinds) for one in each.passes):
                raise UserError(
                    f"{path_of(folder, each.rank)} has an iteration without times of {kinds[0]} passes: the file is "
                    "damaged; measure again with --vocab-parallel"
                )
        times = [
            {kind: took / count for kind, took in passes.items()}
            for passes, count in zip(each.passes, each.microbatches, strict=True)
        ]
        seconds.append({kind: median(one.get(kind, 0.0) for one in times) for kind in sorted(set().union(*times))})
    found = MeasuredRun(tuple(seconds), run.partition, run.schedule, run.vocab)
    by_layer = [took / count for took, count in zip(_apart(seconds)[1], _layers(found.partition), strict=True)]
    for rank, took in enumerate(by_layer):
        if took > IMPLAUSIBLE * median(by_layer):
            raise UserError(
                f"the rank that wrote {path_of(folder, rank)} took {took / median(by_layer):.1f} times as long per "
                "layer as the median rank, but GPUs do not differ that much: check what else ran on the slow rank's "
                "GPU, and measure again"
            )
    return found


def _layers(partition: Partition) -> Sequence[float]:
    """The number of layers on each rank, used to compare ranks by their time per layer.

    Always 1 if the layout is unknown or even, or if ranks have several chunks; also 1 for a rank without layers.
    """
    rows, layers = partition.vocab_rows or (), partition.layers
    return [1.0] * len(rows) if layers is None or len(layers) != len(rows) else [count or 1.0 for count in layers]


def _apart(seconds: Sequence[Seconds]) -> tuple[list[float], list[float]]:
    """Seconds of every rank in passes whose time grows with its rows, and in other passes."""
    of_rows = [sum(each.get(kind, 0.0) for kind in ROW_KINDS) for each in seconds]
    return of_rows, [sum(each.values()) - own for each, own in zip(seconds, of_rows, strict=True)]


@dataclass(frozen=True)
class MeasuredJob:
    """The properties of a job that must match the measured run.

    ranks, tensor: numbers of pipeline and tensor ranks.
    vocab: size of the padded vocabulary; None: not known yet.
    arguments: the job's arguments by long name; arguments that are None or missing are not compared.
    layers: layers of every virtual stage, if the user set the layout.
    """

    ranks: int
    tensor: int
    vocab: int | None
    schedule: str
    method: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None

    def check(self, folder: Path, run: MeasuredRun) -> None:
        """Raise UserError if `run`, read from `folder`, does not match this job."""
        partition = run.partition
        compared: list[tuple[str, object, object]] = [
            ("pipeline ranks", len(run.rows), self.ranks),
            ("tensor ranks", partition.tensor, self.tensor),
            ("vocabulary rows", sum(run.rows), self.vocab),
            ("--pipeline-schedule", run.schedule, self.schedule),
            ("--vocab-parallel-algorithm", run.vocab, self.method),
            *(
                (option_of(name), size, self.arguments.get(name))
                for name, size in partition.sizes
                if name != VOCABULARY
            ),
            ("as layers by stage", partition.layers or self.layers, self.layers),
        ]
        for what, measured, here in compared:
            if here is not None and measured != here:
                said = f"{what} {measured}" if what.startswith("--") else f"{measured} {what}"
                raise UserError(
                    f"--vocab-shards measured:{folder} is from a run with {said}, but this job has {here}: measure a "
                    "run of this job"
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
    rows, (of_rows, others) = partition.vocab_rows, _apart(pass_seconds)
    assert rows is not None
    vocab = sum(rows)
    unit = unit_of_rows(vocab, len(rows), partition.tensor) or partition.tensor
    if not sum(of_rows):
        raise UserError("the measured run spent no time in vocabulary passes: measure a run with --vocab-parallel")
    by_layer = [took / count for took, count in zip(others, _layers(partition), strict=True)]
    by_row = [took / own if own else 0.0 for took, own in zip(of_rows, rows, strict=True)]
    mean, usual = fmean(filter(None, by_row)), fmean(took for took, own in zip(by_layer, rows, strict=True) if own)
    by_row = [own or (mean * took / usual if usual else mean) for own, took in zip(by_row, by_layer, strict=True)]
    units = vocab // unit
    cost = [mean * unit * count for count in range(units + 1)]
    limits = [units if most is None else most[rank] // unit for rank in range(len(rows))]
    filled = fill(others, cost, limits, [max(each, 1e-9 * mean) / mean for each in by_row])
    if filled is None:
        raise UserError("the vocabulary does not fit into the combined memory of all ranks: use more ranks")
    assigned = [unit * count for count in filled]
    assigned[max(rank for rank, count in enumerate(filled) if count)] += vocab % unit
    before, after = (
        max(own + each * count for own, each, count in zip(others, by_row, counts, strict=True))
        for counts in (rows, assigned)
    )
    return Shards(partition.layers, tuple(assigned), before / after)
