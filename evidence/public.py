"""Predict published Megatron runs, and compare the predicted and published throughput, in tokens/s per GPU.

    python evidence/public.py [RUNS.csv] [--models MODELS.csv] [--only TEXT] [--format table|json|csv|markdown]

The runs are grouped into dense bf16, dense fp8 and MoE runs, with separate groups for A100s. The error of a group
covers only its judged runs: the runs whose publication states every setting that affects time. The script takes a
minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.comparison import Outcome, errors_by_group, layout, predicted, to_csv, to_document, to_markdown
from evidence.public_rows import PublicRow, read_rows
from megatron_vp.cli.result_output import progress_lines
from megatron_vp.cost.hardware.gpus import GIB
from megatron_vp.cost.planning.workers import worker_pool
from megatron_vp.errors import UserError


def main(words: Sequence[str] | None = None) -> None:
    """Run the script with `words`, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?", type=Path, help="published runs, with the columns of h100.csv (the default)")
    parser.add_argument("--models", type=Path, help="the models' sizes; default: models.csv")
    parser.add_argument("--only", help="predict only runs whose group, id, source or model contains this text")
    parser.add_argument("--format", choices=WRITERS, default="table")
    given = parser.parse_args(words)
    try:
        rows = [row for row in read_rows(given.runs, given.models) if given.only is None or _names(row, given.only)]
    except UserError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"--only {given.only!r} is not in the group, id, source or model of any published run")
    print(WRITERS[given.format](_predict(rows)), end="")


def _names(row: PublicRow, text: str) -> bool:
    return any(text in each for each in (row.group, row["id"], row["source"], row["model"]))


def _predict(rows: list[PublicRow]) -> list[Outcome]:
    """Predict all rows in worker processes, one per core; results keep the order of the rows."""
    progress = progress_lines()
    with worker_pool(min(len(rows), len(os.sched_getaffinity(0)))) as pool:
        running = [pool.submit(predicted, row) for row in rows]
        for done, _ in enumerate(as_completed(running), start=1):
            progress("predicting runs", done, len(rows))
    return [each.result() for each in running]


def _text(outcomes: list[Outcome]) -> str:
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


WRITERS = {
    "table": _text,
    "json": lambda outcomes: json.dumps(to_document(outcomes), indent=1) + "\n",
    "csv": to_csv,
    "markdown": to_markdown,
}

if __name__ == "__main__":
    main()
