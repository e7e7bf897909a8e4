"""`megatron-vp trace`: show what a traced run did on every rank, as a table and a Perfetto file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.cli.result_output import check_destination, write
from megatron_vp.errors import UserError


def trace(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --pipeline-trace folder of the run.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write one Perfetto file with all ranks; open it in ui.perfetto.dev."),
    ] = None,
) -> None:
    """Show how every rank of a traced run spent its time, and simulate the run with the measured pass times.

    For a run with --vocab-parallel, the command also suggests numbers of vocabulary rows per rank that compensate for
    GPUs of unequal speed.

    Trace a run with: pretrain_gpt_vp.py ... --vocab-parallel --pipeline-trace DIR
    """
    from megatron_vp.cost.planning.measured_rows import measured, next_start
    from megatron_vp.schedule import VocabMethod
    from megatron_vp.trace.figures import figures, held_activations, table
    from megatron_vp.trace.rank_files import merge, read_traces
    from megatron_vp.trace.rank_reports import traced_reports

    check_destination(False, output)
    traces = read_traces(folder)
    typer.echo(table(traces, figures(traces)))
    if traces[0].partition.vocab_rows is not None and VocabMethod(traces[0].vocab).is_sharded:
        try:
            typer.echo(next_start(folder, measured(folder, traced_reports(folder, traces))))
        except UserError as error:
            typer.echo(f"--vocab-shards measured:{folder} would be refused: {error}")
    if output is not None:
        write(merge(traces, held_activations(traces)), output)
