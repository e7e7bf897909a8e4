"""Predicts published runs, and computes the error of each run and of each group of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from evidence.public_rows import PublicRow
from megatron_vp.cost.hardware.gpus import GIB, Hardware, find_hardware
from megatron_vp.cost.layers.job_plan import plan_of
from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.planning.predict import predict
from megatron_vp.cost.planning.samples import sampled
from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import read_job_config


@dataclass(frozen=True)
class Outcome:
    """A published run with its prediction (tokens/s per GPU, bytes on the fullest rank) or the reason why there is
    none.
    """

    row: PublicRow
    tokens_per_second: float | None = None
    peak_memory: float | None = None
    fits: bool | None = None
    refusal: str | None = None

    @property
    def error(self) -> float | None:
        """Error of the predicted tokens/s, relative to the published tokens/s."""
        return None if self.tokens_per_second is None else self.tokens_per_second / self.row.tokens_per_second - 1

    def document(self) -> dict[str, Any]:
        """The outcome as part of a JSON document."""
        row = self.row
        return {
            "id": row["id"],
            "group": row.group,
            "judged": row["judged"],
            "source": row["source"],
            "model": row["model"],
            "layout": layout(row),
            "published": row.tokens_per_second,
            "predicted": self.tokens_per_second,
            "error": self.error,
            "peak_memory_bytes": self.peak_memory,
            "fits": self.fits,
            "refusal": self.refusal,
        }


@dataclass(frozen=True)
class GroupError:
    """Relative errors of a group's `judged` runs: mean and largest absolute value, and signed mean (`bias`)."""

    group: str
    runs: int
    mean: float
    worst: float
    bias: float


def layout(row: PublicRow) -> str:
    """Describe a run by its GPUs, precision, sequence length, micro batch, and parallel sizes above 1."""
    sizes = [f"{name}{row[name]}" for name in ("tp", "pp", "cp", "vp", "ep") if row[name] not in ("", "1")]
    return " ".join([f"{row['gpus']} {row['gpu']}", row["precision"], f"s{row['seq']}", f"b{row['mbs']}", *sizes])


def predicted(row: PublicRow, hardware: Hardware | None = None) -> Outcome:
    """Predict a run on its own GPUs, or on `hardware` if given, by simulating some microbatches (see `sampled`)."""
    try:
        config, hardware = read_job_config([], row.flags()), hardware or find_hardware(row["gpu"])
        job, plan = job_of(config, row.gpus), plan_of(config)
        found = predict(job, plan, hardware, sample=sampled(job, many=16))
    except UserError as error:
        return Outcome(row, refusal=str(error))
    return Outcome(row, found.tokens_per_second / job.gpus, found.peak_memory, found.fits())


def errors_by_group(outcomes: Sequence[Outcome]) -> list[GroupError]:
    """Errors of the judged runs in each group and, as the last entry, in all groups together."""
    judged = [(each.row.group, each.error) for each in outcomes if each.row.judged and each.error is not None]
    return group_errors(judged)


def group_errors(found: Iterable[tuple[str, float]]) -> list[GroupError]:
    """Compute a `GroupError` for each group, and one for all groups together, from (group, error) pairs."""
    groups: dict[str, list[float]] = {}
    for group, error in found:
        groups.setdefault(group, []).append(error)
    groups = dict(sorted(groups.items()))
    if len(groups) > 1:
        groups["all"] = [error for errors in groups.values() for error in errors]
    return [
        GroupError(name, len(errors), fmean(map(abs, errors)), max(map(abs, errors)), fmean(errors))
        for name, errors in groups.items()
    ]


def to_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A JSON document with all runs and the errors of the groups."""
    return {
        "runs": [each.document() for each in outcomes],
        "groups": [asdict(each) for each in errors_by_group(outcomes)],
    }


def to_csv(outcomes: Sequence[Outcome]) -> str:
    """Format one CSV line per run, with the columns of `Outcome.document`."""
    text = io.StringIO()
    documents = [each.document() for each in outcomes]
    writer = csv.DictWriter(text, documents[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(documents)
    return text.getvalue()


def to_markdown(outcomes: Sequence[Outcome]) -> str:
    """Markdown tables of the groups' errors and of all runs, for the documentation."""
    lines = ["| judged runs | number | mean error | worst | bias |", "|---|---|---|---|---|"]
    for found in errors_by_group(outcomes):
        mean, worst, bias = (100 * each for each in (found.mean, found.worst, found.bias))
        lines.append(f"| {found.group} | {found.runs} | {mean:.1f} % | {worst:.1f} % | {bias:+.1f} % |")
    for gpu in sorted({each.row["gpu"] for each in outcomes}):
        held = [each for each in outcomes if each.row["gpu"] == gpu and each.fits is not None]
        fitting = sum(bool(each.fits) for each in held)
        lines += ["", f"All {len(held)} runs on {gpu.upper()} succeeded; {fitting} are predicted to fit in memory."]
    for group in sorted({each.row.group for each in outcomes}):
        lines += ["", f"**{group}**", ""]
        lines += [
            "| model | run | source | published | predicted | error | GiB | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_markdown(each) for each in outcomes if each.row.group == group]
    return "\n".join(lines) + "\n"


def _markdown(outcome: Outcome) -> str:
    row = outcome.row
    start = f"| {row['model']} | {layout(row)} | {row['source']} | {row.tokens_per_second:,.0f} |"
    remarks = [] if row.judged else ["not judged"]
    if outcome.error is None or outcome.peak_memory is None:
        return f"{start} | | | {', '.join([*remarks, f'refused: {outcome.refusal}'])} |"
    remarks += [] if outcome.fits else ["does not fit"]
    figures = f"{outcome.tokens_per_second:,.0f} | {100 * outcome.error:+.1f} % | {outcome.peak_memory / GIB:.0f}"
    return f"{start} {figures} | {', '.join(remarks)} |"
