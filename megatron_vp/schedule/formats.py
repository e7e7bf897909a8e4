"""Writes and reads schedules as JSON (optionally with times and metrics) and as CSV with one line per pass."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from megatron_vp.errors import UserError, printable
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.timeline import Timeline
from megatron_vp.schedule.torch_csv import from_torch_csv, looks_like_actions

CSV_COLUMNS = ["rank", "pass", "chunk", "microbatch", "stage", "start", "end"]
LONGEST_NAME = 200
_HEADER = re.compile(r"# schedule=(?P<name>.*) vocab=(?P<vocab>\S*) microbatches=(?P<microbatches>\d+)")


def to_json(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """The schedule as JSON. If a timeline is given, the JSON also contains metrics and each pass's start and end."""
    spans = timeline.spans if timeline else [repeat(None)] * schedule.pipeline_size
    document: dict[str, Any] = {
        "schedule": schedule.name,
        "vocab": schedule.vocab.value,
        "pipeline_size": schedule.pipeline_size,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement.stage_of,
        **chosen_entries(schedule),
        "ranks": [
            [_entry(step, span) for step, span in zip(order, times, strict=False)]
            for order, times in zip(schedule.ranks, spans, strict=True)
        ],
    }
    if timeline:
        document["metrics"] = {
            "makespan": timeline.makespan,
            "bubble_fraction": timeline.bubble_fraction,
            "peak_activation": timeline.peak_activation,
        }
        if schedule.offloaded:
            document["metrics"] |= {"peak_host": timeline.peak_host}
    return json.dumps(document)


def chosen_entries(schedule: Schedule) -> dict[str, object]:
    """Optional entries of a schedule's JSON: the shape of its building block, and the offloaded (rank, chunk) pairs."""
    entries: dict[str, object] = {"shape": schedule.shape, "offloaded": schedule.offloaded}
    return {key: value for key, value in entries.items() if value}


def _entry(step: Pass, span: tuple[float, float] | None) -> dict[str, object]:
    entry: dict[str, object] = {"pass": step.kind.value, "chunk": step.chunk, "microbatch": step.microbatch}
    return entry | {"start": span[0], "end": span[1]} if span else entry


def from_json(text: str) -> Schedule:
    """Read what `to_json` wrote, with or without times and metrics.

    The backward is split if the file has W passes. Raises a UserError that names the first format error; whether the
    schedule is valid is checked only by `validate`.
    """
    try:
        document = json.loads(text)
        placement = Placement(tuple(tuple(map(_whole, row)) for row in document["placement"]))
        schedule = _assemble(
            document["schedule"],
            document["vocab"],
            placement,
            _whole(document["microbatches"]),
            [
                [_pass(entry, f"pass {number} of rank {rank}") for number, entry in enumerate(order)]
                for rank, order in enumerate(document["ranks"])
            ],
            document.get("shape", ""),
        )
    except KeyError as error:
        raise UserError(
            f"the schedule file lacks the key {error}, which megatron_vp's JSON format requires: add the key"
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the schedule file is not in megatron_vp's JSON format: {error}") from None
    for key, actual in (("pipeline_size", schedule.pipeline_size), ("chunks", schedule.chunks)):
        if document.get(key, actual) != actual:
            raise UserError(f"the schedule file sets '{key}' to {document[key]}, but its 'placement' requires {actual}")
    pairs = [list(pair) for pair in schedule.offloaded]
    if document.get("offloaded", pairs) != pairs:
        raise UserError(
            f"the schedule file lists {document['offloaded']} under 'offloaded', but its O and R passes are for the "
            f"(rank, chunk) pairs {pairs}"
        )
    return schedule


def _pass(entry: dict[str, Any], which: str) -> Pass:
    try:
        return Pass(PassKind(entry["pass"]), _whole(entry["microbatch"]), _whole(entry.get("chunk", 0)))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{which}: {error}") from None


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _assemble(
    name: str,
    vocab: str,
    placement: Placement,
    microbatches: int,
    orders: Sequence[Sequence[Pass]],
    shape: str = "",
) -> Schedule:
    for what, text in (("name", name), ("shape", shape)):
        if not isinstance(text, str) or not text.isprintable() or len(text) > LONGEST_NAME:
            raise ValueError(f"the schedule's {what} must be one printable line of at most {LONGEST_NAME} characters")
    if microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 microbatch, got {microbatches}")
    longest = max(map(len, orders), default=0)
    if microbatches > longest:
        raise ValueError(f"the schedule has {microbatches} microbatches, but no rank lists more than {longest} passes")
    if vocab not in VocabMethod:
        raise ValueError(f"{vocab!r} is not a vocabulary method; use one of {', '.join(VocabMethod)}")
    schedule = Schedule(name, VocabMethod(vocab), placement, microbatches, tuple(map(tuple, orders)), shape)
    return schedule if schedule.split_backward else _all_whole(schedule)


def _all_whole(schedule: Schedule) -> Schedule:
    """Rename every BW to B, because whole backwards are called B in a schedule without W."""
    ranks = tuple(
        tuple(step._replace(kind=PassKind.B) if step.kind is PassKind.BW else step for step in order)
        for order in schedule.ranks
    )
    return replace(schedule, ranks=ranks) if PassKind.BW in schedule.kinds else schedule


def to_csv(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """The schedule as CSV: a comment line with its name, vocabulary method and number of microbatches, then each rank's
    passes in execution order, one pass per line.

    The columns `start` and `end` are empty without a timeline.
    """
    out = io.StringIO()
    out.write(f"# schedule={schedule.name} vocab={schedule.vocab} microbatches={schedule.microbatches}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for rank, order in enumerate(schedule.ranks):
        spans = timeline.spans[rank] if timeline else repeat(("", ""))
        for step, span in zip(order, spans, strict=False):
            stage = schedule.placement.stage_of[rank][step.chunk]
            writer.writerow([rank, step.kind, step.chunk, step.microbatch, stage, *span])
    return out.getvalue()


def from_text(text: str) -> Schedule:
    """Read a schedule from JSON, CSV, or PyTorch's CSV of compute actions. Raises UserError."""
    if text.lstrip().startswith("{"):
        return from_json(text)
    return from_torch_csv(text) if looks_like_actions(text) else from_csv(text)


def from_csv(text: str) -> Schedule:
    """Parse the output of `to_csv`. The columns `start` and `end` are ignored and may be missing. The placement comes
    from the F passes.

    Raises a UserError that names the first format error.
    """
    header, _, body = text.partition("\n")
    about = _HEADER.fullmatch(header.rstrip())
    if about is None:
        raise UserError(
            "the schedule file must begin with '{' (JSON), with '# schedule=NAME vocab=METHOD "
            "microbatches=M' (CSV), or with a PyTorch action such as 0F0"
        )
    reader = csv.DictReader(io.StringIO(body))
    orders: dict[int, list[Pass]] = {}
    stages: dict[int, dict[int, int]] = {}
    try:
        for row in reader:
            rank = _whole_cell(row, "rank")
            step = Pass(PassKind(row["pass"]), _whole_cell(row, "microbatch"), _whole_cell(row, "chunk"))
            orders.setdefault(rank, []).append(step)
            if step.kind is not PassKind.F:
                continue
            stage = _whole_cell(row, "stage")
            if stages.setdefault(rank, {}).setdefault(step.chunk, stage) != stage:
                raise ValueError(
                    f"chunk {step.chunk} of rank {rank} is stage {stages[rank][step.chunk]} in an earlier row and "
                    f"stage {stage} in this one"
                )
    except KeyError as error:
        raise UserError(f"line 2: column {error} is missing; the columns are {', '.join(CSV_COLUMNS)}") from None
    except ValueError as error:
        raise UserError(f"line {1 + reader.line_num}: {error}") from None
    except csv.Error as error:  # before the reader has counted the line
        raise UserError(f"line {2 + reader.line_num}: {error}") from None
    ranks = range(len(orders))
    if not orders or orders.keys() != set(ranks) or stages.keys() != set(ranks):
        raise UserError(
            f"the rows list passes on ranks {sorted(orders)} and F passes on ranks {sorted(stages)}; number the "
            "ranks from 0 without gaps, and give each rank F passes"
        )
    try:
        placement = Placement(tuple(tuple(stages[rank][chunk] for chunk in sorted(stages[rank])) for rank in ranks))
    except ValueError as error:
        raise UserError(f"the column 'stage': {error}") from None
    try:
        return _assemble(
            about["name"], about["vocab"], placement, int(about["microbatches"]), [orders[rank] for rank in ranks]
        )
    except ValueError as error:
        raise UserError(f"line 1: {error}") from None


def _whole_cell(row: dict[str, str], column: str) -> int:
    text = row[column]
    try:
        return int(text)
    except (ValueError, TypeError):
        raise ValueError(f"the column {column!r} holds {printable(text or '', 40)!r}, not a whole number") from None
