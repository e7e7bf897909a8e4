"""Computes figures of a recorded run: the times of each rank, and the mean times of passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from megatron_vp.schedule.costs import PassCosts
from megatron_vp.schedule.draw import aligned
from megatron_vp.schedule.passes import PassKind
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.trace.rank_files import COLLECTIVE, LOAD, RankTrace, TracedSpan

_TIMED = ("F", "B", "W", "S", "T", "IF", "IB")


class RankFigures(NamedTuple):
    """Means over the traced iterations, in milliseconds per iteration.

    busy: time in passes and in the loss function.
    vocabulary: the part of `busy` spent in S and T passes.
    waiting: time for which the host (on CPU) or the compute stream (on GPU) waits for messages and collectives.
    communicating: time that vocabulary collectives take on the second stream, including waiting for peers.
    """

    busy: float
    vocabulary: float
    waiting: float
    communicating: float


class Figures(NamedTuple):
    """Performance figures of all ranks. An iteration lasts from the moment when the first rank starts to compute until
    all ranks have finished.

    costs: mean times of passes and collectives, in milliseconds (see `mean_costs`).
    measured: mean time of an iteration, in milliseconds.
    """

    ranks: tuple[RankFigures, ...]
    costs: PassCosts
    measured: float


def figures(traces: Sequence[RankTrace]) -> Figures:
    """Compute the performance figures of all ranks from their traces (see `read_traces`)."""
    took = []
    for iteration in traces[0].microbatches:
        spans = [each for trace in traces for each in _compute(trace.spans) if each.iteration == iteration]
        took.append(max(span.end for span in spans) - min(span.start for span in spans))
    return Figures(tuple(map(_of_rank, traces)), mean_costs(traces), fmean(took))


def mean_costs(traces: Sequence[RankTrace]) -> PassCosts:
    """Mean durations in milliseconds, of which F, B and W are for all chunks of a rank. A backward that is not split
    counts as B. If passes run in pairs, the times of F and B are those of the passes that run alone.

    A collective's duration is taken from the rank that enters the collective last, because that rank does not wait for
    others.
    """
    took, collectives = dict.fromkeys(_TIMED, 0.0), dict[tuple[str, int], float]()
    alone, pairs = Counter[str](), False
    for span in (span for trace in traces for span in trace.spans):
        kind = "B" if span.category == PassKind.BW else span.category
        pairs |= "|" in kind
        if kind in took:
            took[kind] += span.duration
            alone[kind] += 1
        elif kind == COLLECTIVE:
            key = span.name, span.iteration
            collectives[key] = min(span.duration, collectives.get(key, span.duration))
    each = len(traces) * sum(traces[0].microbatches.values())
    means: dict[str, Any] = {kind: total / each for kind, total in took.items()}
    if pairs:
        means |= {kind: took[kind] * len(traces[0].placement[0]) / alone[kind] for kind in ("F", "B")}
    return PassCosts(**means, comm=fmean(collectives.values() or (0.0,)))


def _compute(spans: Sequence[TracedSpan]) -> list[TracedSpan]:
    """The spans in which a rank computes: passes and losses, but not reading data."""
    return [span for span in spans if span.lane is Lane.COMPUTE and span.category != LOAD]


def _of_rank(trace: RankTrace) -> RankFigures:
    computing = _compute(trace.spans)

    def total(spans: Iterable[TracedSpan]) -> float:
        return sum(span.duration for span in spans) / len(trace.microbatches)

    return RankFigures(
        busy=total(computing),
        vocabulary=total(span for span in computing if span.category in (PassKind.S, PassKind.T)),
        waiting=total(span for span in trace.spans if span.lane is Lane.WAITS),
        communicating=total(span for span in trace.spans if span.lane is Lane.SECOND_STREAM),
    )


def table(traces: Sequence[RankTrace]) -> str:
    """Describe the run, and format the table of its figures that `megatron-vp trace` prints."""
    first, found = traces[0], figures(traces)
    counts, iterations = sorted(set(first.microbatches.values())), sorted(first.microbatches)
    times = ",".join(f"{name}={getattr(found.costs, name):.4g}" for name in (*_TIMED, "comm"))
    rows = [["rank", "busy ms", "bubble %", "S+T % of busy", "waits ms", "collectives ms"]]
    for rank, (busy, vocabulary, *others) in enumerate(found.ranks):
        columns = busy, 100 * (1 - busy / found.measured), 100 * vocabulary / busy, *others
        rows.append([str(rank), *(f"{column:.2f}" for column in columns)])
    lines = [
        f"schedule {first.schedule}, vocabulary {first.vocab}: {len(traces)} ranks, "
        f"{' or '.join(map(str, counts))} microbatches, iterations {', '.join(map(str, iterations))} of the job",
        "",
        *aligned(rows),
        "",
        f"iteration: {found.measured:.2f} ms",
        f"to simulate with the mean times in ms: megatron-vp schedule ... --cost {times}",
    ]
    return "\n".join(lines)
