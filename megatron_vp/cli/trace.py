"""`megatron-vp trace`: what a traced run did on every rank, in one table and one Perfetto file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.output import check_destination, write

if TYPE_CHECKING:
    from megatron_vp.schedule.trace_figures import Figures


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("trace")(trace)


def trace(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What the run had as --pipeline-trace.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write one Perfetto file of all ranks (open in ui.perfetto.dev)."),
    ] = None,
) -> None:
    """Show where the time of a traced run went on every rank, beside what the simulator predicts for its pass times.

    Trace a run with: pretrain_gpt_vp.py ... --vocab-parallel --pipeline-trace DIR
    """
    from megatron_vp.schedule.trace_figures import figures, held_activations
    from megatron_vp.schedule.trace_files import merge, read_traces

    check_destination(False, output)
    traces = read_traces(folder)
    found = figures(traces)
    first = traces[0]
    counts = sorted(set(first.microbatches.values()))
    typer.echo(
        f"schedule {first.schedule}, vocabulary {first.vocab}: {len(traces)} ranks, "
        f"{' or '.join(map(str, counts))} microbatches, iterations {', '.join(map(str, found.iterations))} of the job"
    )
    typer.echo(_table(found))
    if output is not None:
        write(merge(traces, held_activations(traces)), output)


def _table(found: Figures) -> str:
    costs = found.costs.nominal(len(found.ranks))
    names = ("F", "B", "W", "S", "T", "IF", "IB", "comm")
    times = " ".join(f"{name}={getattr(costs, name):.4g}" for name in names)
    lines = [
        f"mean times in ms: {times}",
        f"clocks of the ranks agree within {found.clock_error:.3g} ms",
        "",
        "rank   busy ms   bubble %   S+T % of busy   waits ms   second stream ms   of it hidden %",
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
        f"iteration: measured {found.measured:.2f} ms, predicted from these pass times {found.predicted:.2f} ms "
        f"(measured / predicted {found.measured / found.predicted:.3f})",
    ]
    return "\n".join(lines)


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
