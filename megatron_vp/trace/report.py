"""Formats the report of a recorded run: one line per rank, then the measured and the predicted iteration time."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vp.trace.figures import Figures
from megatron_vp.trace.rank_files import RankTrace


def report(traces: Sequence[RankTrace], found: Figures) -> str:
    """Describe the run, and format the table of its figures (see `figures`) that `megatron-vp trace` prints."""
    first = traces[0]
    counts = sorted(set(first.microbatches.values()))
    costs = found.costs.nominal(len(found.ranks))
    names = ("F", "B", "W", "S", "T", "IF", "IB", "comm")
    times = " ".join(f"{name}={getattr(costs, name):.4g}" for name in names)
    lines = [
        f"schedule {first.schedule}, vocabulary {first.vocab}: {len(traces)} ranks, "
        f"{' or '.join(map(str, counts))} microbatches, iterations {', '.join(map(str, found.iterations))} of the job",
        f"mean times in ms: {times}",
        f"clocks of the ranks agree within {found.clock_error:.3g} ms",
        "",
        "rank   busy ms   bubble %   S+T % of busy   waits ms     collectives ms         hidden %",
    ]
    for rank, figure in enumerate(found.ranks):
        hidden = _percent(figure.hidden, figure.communicating)
        lines.append(
            f"{rank:4d} {figure.busy:9.2f} {100 - _percent(figure.busy, found.measured):10.2f} "
            f"{_percent(figure.vocabulary, figure.busy):15.2f} {figure.waiting:10.2f} {figure.communicating:18.2f} "
            f"{hidden:16.2f}"
        )
    lines += [
        "",
        f"iteration: {found.measured:.2f} ms measured, {found.predicted:.2f} ms predicted from these pass times "
        f"(measured / predicted {found.measured / found.predicted:.3f})",
    ]
    return "\n".join(lines)


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
