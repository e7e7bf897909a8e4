"""Vocabulary rows that follow the measured speed of every GPU: those of the next start, from a run's own pass times.

GPUs of one kind differ by some percent. Layers cannot follow that, rows can. The run's rank reports or traces say how
long each rank computes per microbatch, and with how many rows; rows are then filled up to one level (`water_filling`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from megatron_vp.cost.balance.balanced import Shards, unit_of_rows
from megatron_vp.cost.balance.water_filling import fill
from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.schedule import PassKind
from megatron_vp.trace.figures import mean_pass_times
from megatron_vp.trace.partition import Partition
from megatron_vp.trace.rank_files import RankTrace, read_traces

ROW_KINDS = (PassKind.S, PassKind.T, PassKind.IF, PassKind.IB)
"""Passes whose time grows with the rows of their rank."""

Seconds = Mapping[str, float]
"""Seconds that a rank computes per microbatch, by kind of pass, all its chunks together."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run measured: seconds by pipeline rank, and the layers and rows that it had."""

    seconds: tuple[Seconds, ...]
    partition: Partition


def read_run(folder: Path) -> MeasuredRun:
    """The pass times that a run wrote to `folder` as --rank-report or --pipeline-trace.

    Rank reports count as the median over the iterations that they hold, traces as their mean.
    Raises UserError for a folder without such files, with those of some ranks only, or of a run without rows.
    """
    paths = sorted(folder.glob("rank_*.json"))
    if not paths:
        raise UserError(
            f"{folder} holds no rank_*.json: give the folder that a run with --vocab-parallel had as --rank-report or "
            "--pipeline-trace"
        )
    first = _document(paths[0])
    run = _traced(folder) if "traceEvents" in first else _reported(folder, paths)
    rows = run.partition.vocab_rows
    if rows is None:
        raise UserError(f"{folder} is of a run without vocabulary shards: measure one with --vocab-parallel")
    if len(rows) != len(run.seconds):
        raise UserError(
            f"{folder} has the files of {len(run.seconds)} ranks, and its run had {len(rows)}: put those of all ranks "
            "into one folder"
        )
    return run


def next_rows(
    folder: Path,
    ranks: int,
    tensor: int,
    vocab: int | None,
    layers: tuple[int, ...] | None,
    layout_option: str,
    room: Callable[[Partition], Sequence[int] | None],
) -> Shards:
    """What `--vocab-shards measured:FOLDER` gives a job: rows from the run's pass times, and the run's layers.

    Args:
        ranks, tensor, vocab: pipeline and tensor ranks of the job, and its padded vocabulary (None: not known yet).
        layers: by virtual stage where the user gave a layout, with `layout_option`.
        room: rows that each pipeline rank has memory for with the partition of the run; None where that is not known.

    Raises UserError for a run of another partition, and for what `read_run` and `refilled` refuse.
    """
    run = read_run(folder)
    partition, rows = run.partition, run.partition.vocab_rows or ()
    for what, there, here in (
        ("pipeline ranks", len(rows), ranks),
        ("tensor ranks", partition.tensor, tensor),
        ("vocabulary rows", sum(rows), sum(rows) if vocab is None else vocab),
    ):
        if there != here:
            raise UserError(
                f"--vocab-shards measured:{folder} is of a run with {there} {what}, and this job has {here}: measure a "
                "run of this job"
            )
    if layers is not None and partition.layers is not None and layers != partition.layers:
        raise UserError(
            f"--vocab-shards measured:{folder} is of a run with the layers {list(partition.layers)}, and "
            f"{layout_option} has others: measure a run of this layout, or leave the layout (of a "
            "pattern, its bars) out"
        )
    return refilled(partition, run.seconds, room(partition))


def refilled(partition: Partition, pass_seconds: Sequence[Seconds], most: Sequence[int] | None = None) -> Shards:
    """Rows for a start with the layers of `partition`, from the pass times of a run of it.

    Args:
        pass_seconds: by pipeline rank, see `Seconds`.
        most: rows that each rank has memory for, see `balance.most_rows`; None: any number.

    `gain` is the busiest rank's time per microbatch over what it will be. A row takes as long as the rank's rows took
    on average. A rank that had none is taken to be as fast with them as with its layers, compared with the ranks that
    had some. Raises UserError for a run whose vocabulary passes took no time, and where the rows do not fit into the
    memory.
    """
    rows = partition.vocab_rows
    assert rows is not None
    vocab = sum(rows)
    unit = unit_of_rows(vocab, len(rows), partition.tensor) or partition.tensor
    of_rows = [sum(each.get(kind, 0.0) for kind in ROW_KINDS) for each in pass_seconds]
    others = [sum(took for kind, took in each.items() if kind not in ROW_KINDS) for each in pass_seconds]
    holders = [rank for rank, own in enumerate(rows) if own]
    if not sum(of_rows):
        raise UserError("the measured run has no times of vocabulary passes: measure one with --vocab-parallel")
    by_row = {rank: of_rows[rank] / rows[rank] for rank in holders}
    mean = fmean(by_row.values())
    usual = fmean(others[rank] / _layers(partition, rank, len(rows)) for rank in holders)
    per_row = [
        by_row.get(rank, mean * others[rank] / _layers(partition, rank, len(rows)) / usual if usual else mean)
        for rank in range(len(rows))
    ]
    units = vocab // unit
    cost = [mean * unit * count for count in range(units + 1)]
    limits = [units if most is None else most[rank] // unit for rank in range(len(rows))]
    filled = fill(others, cost, limits, [max(each, 1e-9 * mean) / mean for each in per_row])
    if filled is None:
        raise UserError("the vocabulary does not fit into the memory of all ranks together: use more ranks")
    assigned = [unit * count for count in filled]
    assigned[max(rank for rank, count in enumerate(filled) if count)] += vocab % unit
    before = max(own + more for own, more in zip(others, of_rows, strict=True))
    after = max(own + each * count for own, each, count in zip(others, per_row, assigned, strict=True))
    return Shards(partition.layers, tuple(assigned), before / after)


def next_start(folder: Path, run: MeasuredRun) -> str:
    """What `--vocab-shards measured:FOLDER` would make of the next start, in a line."""
    found = refilled(run.partition, run.seconds)
    assert found.rows is not None
    busiest = max(sum(each.values()) for each in run.seconds)
    return (
        f"the next start with --vocab-shards measured:{folder}: rows {','.join(map(str, found.rows))}; the busiest "
        f"rank computes {1e3 * busiest / found.gain:.2f} ms per microbatch instead of {1e3 * busiest:.2f} "
        f"({found.gain:.3f} times as fast)"
    )


def _layers(partition: Partition, rank: int, ranks: int) -> float:
    """Layers of a rank, in any unit: equal ones without a layout, and where chunks are placed in another way."""
    if partition.layers is None or len(partition.layers) != ranks:
        return 1.0
    return partition.layers[rank] or 1.0


def _reported(folder: Path, paths: Sequence[Path]) -> MeasuredRun:
    found: dict[int, Seconds] = {}
    partitions = set()
    for path in paths:
        document = _document(path)
        try:
            iterations = document["pass_milliseconds_by_iteration"]
            kinds = {kind for each in iterations for kind in each}
            found[int(document["pipeline_rank"])] = {
                kind: median(each.get(kind, 0.0) for each in iterations) / 1e3 / document["microbatches"]
                for kind in sorted(kinds)
            }
            partitions.add(Partition.of(document))
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            raise UserError(
                f"{path} is neither a rank report nor a trace; give a folder that holds nothing else"
            ) from None
    if len(partitions) > 1 or sorted(found) != list(range(len(paths))):
        raise UserError(f"{folder} holds the rank reports of different runs: report into an empty folder")
    return MeasuredRun(tuple(found[rank] for rank in range(len(paths))), partitions.pop())


def _traced(folder: Path) -> MeasuredRun:
    return traced_run(read_traces(folder))


def traced_run(traces: Sequence[RankTrace]) -> MeasuredRun:
    """What the traces of all ranks say."""
    times = mean_pass_times(traces)
    return MeasuredRun(tuple({kind: 1e-3 * took for kind, took in each.items()} for each in times), traces[0].partition)


def _document(path: Path) -> Mapping:
    try:
        document = json.loads(read_text(path, "rank report", 512 * MIB))
    except ValueError:
        raise UserError(f"{path} is no JSON: give the folder of a run's rank reports or traces") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is neither a rank report nor a trace; give a folder that holds nothing else")
    return document
