"""`megatron-vp trace`: show what a traced run did on every rank, as a table and a Perfetto file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.cli.result_output import check_destination, write


def trace(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --pipeline-trace folder of the run.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write one Perfetto file with all ranks; open it in ui.perfetto.dev."),
    ] = None,
) -> None:
    """Show how every rank of a traced run spent its time, and simulate the run with the measured pass times.

    Trace a run with: pretrain_gpt_vp.py ... --vocab-parallel --pipeline-trace DIR
    """
    from megatron_vp.trace.figures import figures, held_activations, table
    from megatron_vp.trace.rank_files import merge, read_traces

    check_destination(False, output)
    traces = read_traces(folder)
    typer.echo(table(traces, figures(traces)))
    if output is not None:
        write(merge(traces, held_activations(traces)), output)
