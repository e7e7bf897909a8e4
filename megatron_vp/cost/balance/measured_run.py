"""Reads a run's pass times from its rank reports or traces, and refuses files that may be wrong.

A report that is damaged, belongs to another run or covers too few iterations would put rows on the wrong ranks, and no
later check would detect the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron_vp.errors import UserError
from megatron_vp.schedule import PassKind
from megatron_vp.trace.figures import iteration_pass_times
from megatron_vp.trace.partition import VOCABULARY, Partition
from megatron_vp.trace.rank_files import RankTrace, path_of, rank_paths, read_document, read_traces
from megatron_vp.trace.rank_reports import RankReport, read_reports

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
    """For each iteration of one rank, the number of microbatches, and each kind of pass's seconds per microbatch."""

    path: Path
    microbatches: tuple[int, ...]
    times: tuple[Seconds, ...]

    @classmethod
    def of(cls, folder: Path, rank: int, microbatches: Sequence[int], sums: Iterable[Seconds]) -> _Rank:
        """Divide the sums of an iteration's passes by its number of microbatches."""
        times = tuple(
            {kind: took / count for kind, took in each.items()} for each, count in zip(sums, microbatches, strict=True)
        )
        return cls(path_of(folder, rank), tuple(microbatches), times)


def read_run(folder: Path) -> MeasuredRun:
    """Read the pass times that a run wrote to `folder` with --rank-report or --pipeline-trace.

    Raises UserError if files are missing, come from several runs or from a run without vocabulary shards, cover too few
    iterations, or contain impossible values.
    """
    paths = rank_paths(folder, "--rank-report or --pipeline-trace")
    if "traceEvents" in read_document(paths[0]):
        return traced_run(folder, read_traces(folder))
    reports = read_reports(folder)
    ranks = [_Rank.of(folder, rank, each.microbatches, each.passes) for rank, each in enumerate(reports)]
    return _checked(folder, ranks, reports[0])


def traced_run(folder: Path, traces: Sequence[RankTrace]) -> MeasuredRun:
    """Convert all ranks' traces, which come from `folder`, to measurements. Raises UserError as `read_run` does."""
    ranks = []
    for trace in traces:
        times = iteration_pass_times(trace)
        counts = tuple(count for _, count in sorted(trace.microbatches.items()))
        path = path_of(folder, trace.rank)
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
        sums = ({kind: sum(one) / 1e3 for kind, one in each.items()} for each in times)
        ranks.append(_Rank.of(folder, trace.rank, counts, sums))
    return _checked(folder, ranks, traces[0])


def _checked(folder: Path, ranks: Sequence[_Rank], run: RankReport | RankTrace) -> MeasuredRun:
    """Check the ranks' times; `run` has what all ranks of the run have in common."""
    _check_partition(folder, run.partition, len(ranks))
    rows = run.partition.vocab_rows or ()
    iterations = min(len(each.times) for each in ranks)
    for number, each in enumerate(ranks):
        if len(each.times) > iterations + 1:
            raise UserError(
                f"{each.path} has {len(each.times)} measured iterations, but another rank's file has {iterations}: the "
                "run ended early, or a file is incomplete; measure again"
            )
        if each.microbatches[:iterations] != ranks[0].microbatches[:iterations]:
            raise UserError(
                f"{folder}: ranks 0 and {number} recorded different numbers of microbatches for the same iteration; "
                "repeat the measurement with an empty folder"
            )
        _check_times(each, rows[number] > 0)
    if iterations < ENOUGH:
        raise UserError(
            f"{folder} has {iterations} measured iterations, but at least {ENOUGH} are needed (20 are better): train "
            f"at least {ENOUGH + 1} iterations with --rank-report, or trace at least {ENOUGH}, for example with "
            "--pipeline-trace-iterations 3-22"
        )
    kinds = [sorted({kind for one in each.times for kind in one}) for each in ranks]
    seconds = tuple(
        {kind: median(one.get(kind, 0.0) for one in each.times) for kind in own}
        for each, own in zip(ranks, kinds, strict=True)
    )
    _check_speeds(ranks, seconds, run.partition)
    uncertainty = max(_uncertainty([sum(one.values()) for one in each.times]) for each in ranks)
    return MeasuredRun(seconds, run.partition, run.schedule, run.vocab, iterations, uncertainty)


def _check_partition(folder: Path, partition: Partition, ranks: int) -> None:
    rows, sizes = partition.vocab_rows, dict(partition.sizes)
    if rows is None:
        raise UserError(f"{folder} is from a run without vocabulary shards: measure a run with --vocab-parallel")
    vocab, layers = sizes.get(VOCABULARY), sizes.get("num_layers")
    if vocab is None or partition.tensor < 1 or any(size < 1 for size in sizes.values()):
        raise UserError(
            f"{folder} does not record valid model and batch sizes: measure again with this version of megatron_vp"
        )
    if len(rows) != ranks or min(rows) < 0 or sum(rows) != vocab:
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
