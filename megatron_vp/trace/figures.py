"""Computes figures of a recorded run: each rank's times, and the simulator's prediction from the run's pass times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from megatron_vp.errors import UserError
from megatron_vp.schedule.costs import StageCosts
from megatron_vp.schedule.draw import aligned
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.timeline import simulate
from megatron_vp.schedule.transfers import Channel, CollectiveKind
from megatron_vp.trace.rank_files import COLLECTIVE, LOAD, LOSS, RankTrace, TracedSpan

VOCABULARY_KINDS = (PassKind.S, PassKind.T)
_TIMED = ("F", "B", "W", "S", "T", "IF", "IB")


@dataclass(frozen=True)
class RankFigures:
    """Means over the traced iterations, in milliseconds per iteration.

    busy: time in passes and in the loss function.
    vocabulary: the part of `busy` spent in S and T passes.
    waiting: time for which the host (on CPU) or the compute stream (on GPU) waits for messages and collectives.
    communicating: time that vocabulary collectives take on the second stream, including waiting for peers.
    hidden: the part of `communicating` during which the rank runs passes or the loss function.
    """

    busy: float
    vocabulary: float
    waiting: float
    communicating: float
    hidden: float


class Figures(NamedTuple):
    """Performance figures of all ranks. An iteration lasts from the moment when the first rank starts to compute until
    all ranks have finished.

    costs: mean times of passes and collectives, in milliseconds (see `mean_costs`).
    predicted: the iteration time in milliseconds that the simulator predicts from the executed order and `costs`,
        assuming that the loss function takes no time.
    """

    ranks: tuple[RankFigures, ...]
    costs: StageCosts
    measured: float
    predicted: float


def figures(traces: Sequence[RankTrace]) -> Figures:
    """Compute the performance figures of all ranks from their traces (see `read_traces`). Raises UserError if passes
    are missing.
    """
    took, predicted = [], []
    try:
        costs = mean_costs(traces)
        for iteration in traces[0].microbatches:
            predicted.append(simulate(ran(traces, iteration), costs).makespan)
            spans = [each for trace in traces for each in _compute(trace.spans) if each.iteration == iteration]
            took.append(max(span.end for span in spans) - min(span.start for span in spans))
    except ValueError as error:
        raise UserError(f"the traced passes do not form a valid schedule: {error}") from None
    ranks = tuple(_of_rank(trace.spans, len(trace.microbatches)) for trace in traces)
    return Figures(ranks, costs, fmean(took), fmean(predicted))


def ran(traces: Sequence[RankTrace], iteration: int) -> Schedule:
    """The schedule of an iteration, as the ranks executed it."""
    first = traces[0]
    orders = tuple(tuple(Pass.parse(span.name) for span in _passes(trace, iteration)) for trace in traces)
    placement = Placement(first.placement)
    return Schedule(first.schedule, VocabMethod(first.vocab), placement, first.microbatches[iteration], orders)


def mean_costs(traces: Sequence[RankTrace]) -> StageCosts:
    """Mean durations of passes and collectives in milliseconds. A backward that is not split counts as B.

    A collective's duration is taken from the rank that enters the collective last, because that rank does not wait for
    others. The transfer of messages is not timed, so every message gets the mean duration of a collective.
    """
    took: dict[tuple, list[float]] = defaultdict(list)
    collectives: dict[tuple[int, str], float] = {}
    for trace in traces:
        for span in _passes(trace):
            step = Pass.parse(span.name)
            took[step.kind, trace.rank, step.chunk].append(span.duration)
        for span in trace.spans:
            if span.category == COLLECTIVE:
                key = (span.iteration, span.name)
                collectives[key] = min(span.duration, collectives.get(key, span.duration))
    for (kind, *seat), durations in list(took.items()):
        if kind is PassKind.BW:  # A chunk whose backward is never split has BW instead of B and W.
            took.setdefault((PassKind.B, *seat), durations)
    by_kind: dict[CollectiveKind, list[float]] = defaultdict(list)
    for (_, name), duration in collectives.items():
        by_kind[CollectiveKind(name.partition(":")[0])].append(duration)
    means = {kind: fmean(durations) for kind, durations in by_kind.items()}

    placement = Placement(traces[0].placement)
    ranks = range(placement.ranks)
    passes: dict[str, Any] = {}
    for kind in (PassKind[name] for name in _TIMED):
        of_stages = ((placement.rank_of(stage), placement.chunk_of(stage)) for stage in range(placement.stages))
        seats = of_stages if kind.per_chunk else ((rank, 0) for rank in ranks)
        passes[kind.value] = tuple(fmean(took.get((kind, *seat), (0.0,))) for seat in seats)
    messages = dict.fromkeys(product(ranks, ranks, Channel), fmean(means.values()) if means else 0.0)
    return StageCosts(**passes, messages=messages, collectives=means)


def _passes(trace: RankTrace, iteration: int | None = None) -> list[TracedSpan]:
    """The passes of an iteration, or of all iterations."""
    passes = [span for span in _compute(trace.spans) if span.category != LOSS]
    return passes if iteration is None else [span for span in passes if span.iteration == iteration]


def _compute(spans: Sequence[TracedSpan]) -> list[TracedSpan]:
    """The spans in which a rank computes: passes and losses, but not reading data."""
    return [span for span in spans if span.lane is Lane.COMPUTE and span.category != LOAD]


def _of_rank(spans: Sequence[TracedSpan], count: int) -> RankFigures:
    """Compute a rank's figures from the spans of `count` iterations, in order of start."""
    computing = _compute(spans)
    second_stream = [span for span in spans if span.lane is Lane.SECOND_STREAM]
    return RankFigures(
        busy=_total(computing) / count,
        vocabulary=_total(span for span in computing if span.category in VOCABULARY_KINDS) / count,
        waiting=_total(span for span in spans if span.lane is Lane.WAITS) / count,
        communicating=_total(second_stream) / count,
        hidden=_overlap(computing, second_stream) / count,
    )


def _total(spans: Iterable[TracedSpan]) -> float:
    """Sum of the durations of `spans`."""
    return sum(span.duration for span in spans)


def _overlap(some: Sequence[TracedSpan], others: Sequence[TracedSpan]) -> float:
    """Total time during which spans of both sequences overlap. The spans of each sequence must be in order and
    disjoint.
    """
    common, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        common += max(0.0, min(some[i].end, others[j].end) - max(some[i].start, others[j].start))
        if some[i].end <= others[j].end:
            i += 1
        else:
            j += 1
    return common


def table(traces: Sequence[RankTrace], found: Figures) -> str:
    """Describe the run, and format the table of its figures (see `figures`) that `megatron-vp trace` prints."""
    first = traces[0]
    counts, iterations = sorted(set(first.microbatches.values())), sorted(first.microbatches)
    costs = found.costs.nominal(len(found.ranks))
    times = " ".join(f"{name}={getattr(costs, name):.4g}" for name in (*_TIMED, "comm"))
    rows = [["rank", "busy ms", "bubble %", "S+T % of busy", "waits ms", "collectives ms", "hidden %"]]
    for rank, figure in enumerate(found.ranks):
        idle, vocabulary = 100 - _percent(figure.busy, found.measured), _percent(figure.vocabulary, figure.busy)
        hidden = _percent(figure.hidden, figure.communicating)
        columns = (figure.busy, idle, vocabulary, figure.waiting, figure.communicating, hidden)
        rows.append([str(rank), *(f"{column:.2f}" for column in columns)])
    lines = [
        f"schedule {first.schedule}, vocabulary {first.vocab}: {len(traces)} ranks, "
        f"{' or '.join(map(str, counts))} microbatches, iterations {', '.join(map(str, iterations))} of the job",
        f"mean times in ms: {times}",
        "",
        *aligned(rows),
        "",
        f"iteration: {found.measured:.2f} ms measured, {found.predicted:.2f} ms predicted from these pass times "
        f"(measured / predicted {found.measured / found.predicted:.3f})",
    ]
    return "\n".join(lines)


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
