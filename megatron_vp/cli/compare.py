"""`megatron-vp report` and `trace`: compare two recorded runs of a job, and show what every rank of one did."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.cli.planning import OutputOption
from megatron_vp.cli.result_output import check_destination, format_for, write


class Format(StrEnum):
    """The output formats of the command."""

    TEXT = "text"
    JSON = "json"
    PNG = "png"


def report(
    plain: Annotated[Path, typer.Argument(metavar="PLAIN", help="The --rank-report folder of the plain run.")],
    split: Annotated[
        Path, typer.Argument(metavar="VP", help="The --rank-report folder of the vocabulary-parallel run.")
    ],
    logs: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--logs", metavar="PLAIN_LOG VP_LOG", help="Logs of the two runs, if not in the folders PLAIN and VP."
        ),
    ] = None,
    asked: Annotated[Format | None, typer.Option("--format", help="Output format; png needs -o FILE.")] = None,
    output: OutputOption = None,
) -> None:
    """Compare a plain run with a vocabulary-parallel run of the same job, rank by rank.

    Shows how long each pipeline rank computed and waited, its memory, both loss curves and their largest difference.

    Give each run its own folder with --rank-report DIR, and save the run's log there as the only *.log, *.out or *.txt
    file with losses. Otherwise, name both logs with --logs.

    \b
    megatron-vp report plain/ vocab-2/
    megatron-vp report plain/ vocab-2/ --logs slurm-17.out slurm-18.out -o report.png
    """
    from megatron_vp.trace.two_runs import picture, read_two_runs

    chosen = format_for(asked, output, Format, otherwise=Format.TEXT)
    runs = read_two_runs(plain, split, logs)
    if chosen is Format.PNG:
        write(picture(runs), output)
    else:
        write((json.dumps(runs.document()) if chosen is Format.JSON else runs.text()) + "\n", output)


def trace(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --pipeline-trace folder of the run.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write one Perfetto file with all ranks; open it in ui.perfetto.dev."),
    ] = None,
) -> None:
    """Show how every rank of a traced run spent its time, and the mean times of its passes.

    Trace a run with: pretrain_gpt_vp.py ... --vocab-parallel --pipeline-trace DIR
    """
    from megatron_vp.trace.figures import table
    from megatron_vp.trace.rank_files import merge, read_traces

    check_destination(False, output)
    traces = read_traces(folder)
    typer.echo(table(traces))
    if output is not None:
        write(merge(traces), output)
