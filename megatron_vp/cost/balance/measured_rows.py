"""Assigns vocabulary rows for a job's next start, based on the GPU speeds that were measured in an earlier run.

GPUs of the same model differ in speed by a few percent. Moving rows can compensate for this; moving whole layers is too
coarse. The earlier run's rank reports or traces say how long each rank computes per microbatch, and how many rows it
has. Rows are then assigned so that all ranks take about the same time (`water_filling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from megatron_vp.cost.balance.balanced import Shards, unit_of_rows
from megatron_vp.cost.balance.measured_run import ROW_KINDS, MeasuredRun, Seconds, layers_on, read_run
from megatron_vp.cost.balance.water_filling import fill
from megatron_vp.cost.hardware.constants import ERROR_BAND
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.trace.partition import VOCABULARY, Partition

CERTAIN = 2.0
"""A gain of less than this many standard deviations is not significant."""


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
