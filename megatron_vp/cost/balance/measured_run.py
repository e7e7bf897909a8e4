"""Reads a run's pass times from its rank reports or traces, and refuses files that may be wrong.

A report that is damaged, belongs to another run or covers too few iterations would put rows on the wrong ranks, and no
later check would detect the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule import PassKind
from megatron_vp.trace.figures import iteration_pass_times
from megatron_vp.trace.partition import VOCABULARY, Partition
from megatron_vp.trace.rank_files import RankTrace, read_traces
from megatron_vp.trace.rank_reports import read_document

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


@dataclass(frozen=True)
class _Rank:
    """One rank's file: the run's properties, and for each iteration, the time of each kind of pass per microbatch, in
    milliseconds.
    """

    path: Path
    rank: int
    run: str
    schedule: str
    vocab: str
    partition: Partition
    microbatches: tuple[int, ...]
    times: tuple[Mapping[str, float], ...]


def read_run(folder: Path) -> MeasuredRun:
    """Read the pass times that a run wrote to `folder` with --rank-report or --pipeline-trace.

    Raises UserError if files are missing, come from several runs or from a run without vocabulary shards, cover too few
    iterations, or contain impossible values.
    """
    paths = sorted(folder.glob("rank_*.json"))
    if not paths:
        raise UserError(
            f"{folder} contains no rank_*.json files: give the folder to which a run with --vocab-parallel wrote its "
            "--rank-report or --pipeline-trace"
        )
    if "traceEvents" in read_document(paths[0]):
        return traced_run(folder, read_traces(folder))
    return _checked(folder, [_reported(path, read_document(path)) for path in paths])


def traced_run(folder: Path, traces: Sequence[RankTrace]) -> MeasuredRun:
    """Convert all ranks' traces, which come from `folder`, to measurements. Raises UserError as `read_run` does."""
    ranks = []
    for trace in traces:
        times = iteration_pass_times(trace)
        counts = tuple(count for _, count in sorted(trace.microbatches.items()))
        path = folder / f"rank_{trace.rank}.json"
        rows = trace.partition.vocab_rows
        for each, count in zip(times, counts, strict=True):
            wanted = {PassKind.F: count * len(trace.placement[trace.rank])}
            if rows is not None and trace.rank < len(rows) and rows[trace.rank]:
                wanted |= {PassKind.S: count, PassKind.T: count}
            for kind, passes in wanted.items():
                if len(each.get(kind, ())) != passes:
                    raise UserError(
                        f"{path} has {len(each.get(kind, ()))} {kind} passes in an iteration that should have "
                        f"{passes}: the file is damaged or truncated; trace the run again"
                    )
        sums = tuple(
            {kind: sum(one) / count for kind, one in each.items()} for each, count in zip(times, counts, strict=True)
        )
        ranks.append(_Rank(path, trace.rank, trace.run, trace.schedule, trace.vocab, trace.partition, counts, sums))
    return _checked(folder, ranks)


def _reported(path: Path, document: Mapping[str, Any]) -> _Rank:
    """Read one rank's report, without its first iteration."""
    try:
        iterations, counts = document["pass_milliseconds_by_iteration"], document["microbatches_by_iteration"]
        own = {name: document[name] for name in ("run", "schedule", "vocab")}
        partition, rank = Partition.of(document), document["pipeline_rank"]
        pairs = list(zip(iterations, counts, strict=True))[1:]
        if not all(isinstance(each, str) for each in own.values()) or type(rank) is not int:
            raise ValueError
        if any(type(count) is not int for _, count in pairs):
            raise ValueError
        times = tuple({str(kind): took / count for kind, took in each.items()} for each, count in pairs)
    except ZeroDivisionError:
        raise UserError(f"{path} has an iteration without microbatches: the file is damaged; measure again") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{path} is neither a rank report nor a trace that this version of megatron_vp can read: repeat the "
            "measurement with an empty folder"
        ) from None
    return _Rank(path, rank, **own, partition=partition, microbatches=tuple(count for _, count in pairs), times=times)


def _checked(folder: Path, ranks: Sequence[_Rank]) -> MeasuredRun:
    ranks = sorted(ranks, key=lambda each: each.rank)
    first = ranks[0]
    for other in ranks[1:]:
        for what in ("run", "schedule", "vocab", "partition"):
            if getattr(first, what) != getattr(other, what):
                raise UserError(
                    f"the files of ranks {first.rank} and {other.rank} in {folder} are from different runs: repeat the "
                    "measurement with an empty folder"
                )
    _check_partition(folder, first.partition)
    rows = first.partition.vocab_rows or ()
    if [each.rank for each in ranks] != list(range(len(rows))):
        raise UserError(
            f"{folder} has files from ranks {', '.join(str(each.rank) for each in ranks)}, but the run had ranks 0 "
            f"to {len(rows) - 1}: put exactly one file per rank into the folder"
        )
    iterations = min(len(each.times) for each in ranks)
    for each in ranks:
        if len(each.times) > iterations + 1:
            raise UserError(
                f"{each.path} has {len(each.times)} measured iterations, but another rank's file has {iterations}: the "
                "run ended early, or a file is incomplete; measure again"
            )
        if each.microbatches[:iterations] != first.microbatches[:iterations]:
            raise UserError(
                f"{folder}: ranks {first.rank} and {each.rank} recorded different numbers of microbatches for the same "
                "iteration; repeat the measurement with an empty folder"
            )
        _check_times(each, rows[each.rank] > 0)
    if iterations < ENOUGH:
        raise UserError(
            f"{folder} has {iterations} measured iterations, but at least {ENOUGH} are needed (20 are better): train "
            f"at least {ENOUGH + 1} iterations with --rank-report, or trace at least {ENOUGH}, for example with "
            "--pipeline-trace-iterations 3-22"
        )
    kinds = [sorted({kind for one in each.times for kind in one}) for each in ranks]
    seconds = tuple(
        {kind: median(one.get(kind, 0.0) for one in each.times) / 1e3 for kind in own}
        for each, own in zip(ranks, kinds, strict=True)
    )
    _check_speeds(ranks, seconds, first.partition)
    uncertainty = max(_uncertainty([sum(one.values()) for one in each.times]) for each in ranks)
    return MeasuredRun(seconds, first.partition, first.schedule, first.vocab, iterations, uncertainty)


def _check_partition(folder: Path, partition: Partition) -> None:
    rows, sizes = partition.vocab_rows, dict(partition.sizes)
    if rows is None:
        raise UserError(f"{folder} is from a run without vocabulary shards: measure a run with --vocab-parallel")
    vocab, layers = sizes.get(VOCABULARY), sizes.get("num_layers")
    if vocab is None or partition.tensor < 1 or any(size < 1 for size in sizes.values()):
        raise UserError(
            f"{folder} does not record valid model and batch sizes: measure again with this version of megatron_vp"
        )
    if min(rows, default=-1) < 0 or sum(rows) != vocab:
        raise UserError(
            f"{folder} records {','.join(map(str, rows))} vocabulary rows per rank, which do not add up to the "
            f"vocabulary size {vocab}: the files are damaged; measure again"
        )
    if partition.layers is not None and (
        min(partition.layers, default=-1) < 0 or layers not in (None, sum(partition.layers))
    ):
        raise UserError(
            f"{folder} records {','.join(map(str, partition.layers))} layers per stage, which do not add up to the "
            f"{layers} layers of the run: the files are damaged; measure again"
        )


def _check_times(each: _Rank, has_rows: bool) -> None:
    needed = [(PassKind.F,), (PassKind.B, PassKind.BW), *([(PassKind.S,), (PassKind.T,)] if has_rows else [])]
    for one in each.times:
        for kind, took in one.items():
            if type(took) not in (int, float) or not 0 <= took < math.inf:
                raise UserError(
                    f"{each.path} says that {kind} passes took {took} ms per microbatch: the file is damaged; measure "
                    "again"
                )
        for kinds in needed:
            if not sum(one.get(kind, 0.0) for kind in kinds):
                raise UserError(
                    f"{each.path} has an iteration without times of {kinds[0]} passes: the file is damaged; measure "
                    "again with --vocab-parallel"
                )


def _check_speeds(ranks: Sequence[_Rank], seconds: Sequence[Seconds], partition: Partition) -> None:
    by_layer = [
        sum(took for kind, took in own.items() if kind not in ROW_KINDS) / layers_on(partition, rank, len(ranks))
        for rank, own in enumerate(seconds)
    ]
    usual = median(by_layer)
    for each, took in zip(ranks, by_layer, strict=True):
        if took > IMPLAUSIBLE * usual:
            raise UserError(
                f"the rank that wrote {each.path} took {took / usual:.1f} times as long per layer as the median rank, "
                "but GPUs do not differ that much: check what else ran on the slow rank's GPU, and measure again"
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
