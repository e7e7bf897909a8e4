"""`megatron-vp paper public`: compare the throughput of published Megatron runs with predictions."""

from __future__ import annotations

import json
import os
from concurrent.futures import as_completed
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.result_output import format_for, progress_bar, write

if TYPE_CHECKING:
    from megatron_vp.cost.public.comparison import Outcome
    from megatron_vp.cost.public.public_rows import PublicRow


class Format(StrEnum):
    """The output formats of the command."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("public", short_help="Compare published Megatron runs with predictions.")(public)


def public(
    runs: Annotated[
        Path | None,
        typer.Argument(help="CSV file of published runs, with the columns of the package's h100.csv (the default)."),
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="CSV file with the sizes of the models; default: the package's models.csv.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Predict only runs whose group, id, source or model contains this text.")
    ] = None,
    asked_format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Output format (default: the one that the -o file's suffix names, else a table)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the output to this file instead of the screen.")
    ] = None,
) -> None:
    """Predict published runs and print the predicted and published throughput, in tokens/s per GPU.

    The runs are grouped into dense bf16, dense fp8 and MoE runs, with separate groups for A100s. The error of a group
    covers only its judged runs: the runs whose publication states every setting that affects time. The command takes a
    minute or two.
    """
    from megatron_vp.cost.public.comparison import to_csv, to_document, to_markdown
    from megatron_vp.cost.public.public_rows import read_rows
    from megatron_vp.errors import UserError

    output_format = format_for(asked_format, output, Format)
    rows = [row for row in read_rows(runs, models) if only is None or _names(row, only)]
    if not rows:
        raise UserError(
            f"--only {only!r} is not in the group, id, source or model of any published run; use another text"
        )
    outcomes = _predict(rows)
    match output_format:
        case Format.TABLE:
            write(_text(outcomes), output)
        case Format.JSON:
            write(json.dumps(to_document(outcomes), indent=1) + "\n", output)
        case Format.CSV:
            write(to_csv(outcomes), output)
        case Format.MARKDOWN:
            write(to_markdown(outcomes), output)


def _names(row: PublicRow, text: str) -> bool:
    return any(text in each for each in (row.group, row["id"], row["source"], row["model"]))


def _predict(rows: list[PublicRow]) -> list[Outcome]:
    """Predict all rows in worker processes, one per core; results keep the order of the rows."""
    from megatron_vp.cost.planning.workers import worker_pool
    from megatron_vp.cost.public.comparison import predicted

    with progress_bar() as progress:
        task = progress.add_task("predicting runs", total=len(rows))
        with worker_pool(min(len(rows), len(os.sched_getaffinity(0)))) as pool:
            running = [pool.submit(predicted, row) for row in rows]
            for _ in as_completed(running):
                progress.update(task, advance=1)
    return [each.result() for each in running]


def _text(outcomes: list[Outcome]) -> str:
    from megatron_vp.cost.hardware.gpus import GIB
    from megatron_vp.cost.public.comparison import errors_by_group, layout

    lines = [
        f"{'model':18}{'run':34}{'published':>10}{'predicted':>10}{'error':>8}{'GiB':>7}  source",
        f"{'':52}{'tokens/s per GPU':>20}{'%':>8}",
    ]
    groups = sorted({each.row.group for each in outcomes})
    for group in groups:
        lines += ["", group]
        for each in outcomes:
            if each.row.group == group:
                start = f"{each.row['model']:18}{layout(each.row):34}{each.row.tokens_per_second:10,.0f}"
                if each.error is None or each.peak_memory is None:
                    lines.append(f"{start}  refused: {each.refusal}")
                    continue
                full = "" if each.fits else "  does not fit"
                judged = "" if each.row.judged else "  not judged"
                lines.append(
                    f"{start}{each.tokens_per_second:10,.0f}{100 * each.error:+8.1f}{each.peak_memory / GIB:7.1f}"
                    f"  {each.row['source']}{judged}{full}"
                )
    lines += ["", f"{'judged runs':18}{'number':>8}{'mean error':>12}{'worst':>8}{'bias':>8}   percent"]
    for error in errors_by_group(outcomes):
        shares = (100 * each for each in (error.mean, error.worst, error.bias))
        mean, worst, bias = shares
        lines.append(f"{error.group:18}{error.runs:8}{mean:12.1f}{worst:8.1f}{bias:+8.1f}")
    for gpu in sorted({each.row["gpu"] for each in outcomes}):
        held = [each for each in outcomes if each.row["gpu"] == gpu and each.fits is not None]
        lines.append(
            f"{sum(bool(each.fits) for each in held)} of {len(held)} {gpu} runs are predicted to fit in memory"
        )
    return "\n".join(lines) + "\n"
