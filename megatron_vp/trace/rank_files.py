"""Defines the files of a recorded run, one Perfetto trace per rank, and reads, checks and merges these files.

All ranks measure time from the same starting point, so traces are merged by concatenating their events. Data that
Perfetto does not show (the run, the schedule, the clock error) is stored under the key `otherData`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.schedule import perfetto
from megatron_vp.schedule.perfetto import Lane
from megatron_vp.trace.partition import UNKNOWN, Partition

COLLECTIVE = "collective"
LOSS = "loss"
LOAD = "load"
WAIT = "wait"
"""Categories of all spans except passes; the category of a pass is its kind, such as F."""

_LANES = (Lane.COMPUTE, Lane.SECOND_STREAM, Lane.WAITS, Lane.COPIES)


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """One activity of a rank in a traced iteration.

    The span is a pass (named `F12`), a loss (`LOSS:3`), a read of data (`LOAD:3`), a collective (`C1:3`), a copy to the
    host or back (`copy-out:3.1[0]`), or a wait, which is named after what it waits for. Times are in milliseconds;
    `posted` is the time at which the rank submitted a collective or a copy to its stream.
    """

    iteration: int
    lane: Lane
    name: str
    category: str
    start: float
    end: float
    posted: float | None = None


@dataclass(frozen=True)
class RankTrace:
    """One rank's recording; all fields except `rank`, `clock_error` and `spans` are the same on all ranks of a run.

    placement: the virtual stages of each rank, as in a schedule.
    microbatches: the number of microbatches in each traced iteration.
    clock_error: milliseconds by which this rank's times may be off relative to rank 0's.
    spans: everything recorded, in order of start.
    """

    run: str
    rank: int
    schedule: str
    vocab: str
    placement: tuple[tuple[int, ...], ...]
    microbatches: dict[int, int]
    clock_error: float
    spans: tuple[TracedSpan, ...]
    partition: Partition = UNKNOWN

    def to_json(self) -> str:
        """Format this trace as Perfetto JSON, which `from_json` reads back."""
        about = {
            "run": self.run,
            "rank": self.rank,
            "schedule": self.schedule,
            "vocab": self.vocab,
            "placement": self.placement,
            "microbatches": self.microbatches,
            "clock_error_ms": self.clock_error,
            **self.partition.document(),
        }
        return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": self.events()})

    def events(self) -> list[perfetto.Event]:
        """All events of the trace: the names of the rank and its lanes, and a slice for each span."""
        used = {span.lane for span in self.spans}
        events = perfetto.process(self.rank, *(lane for lane in _LANES if lane in used or lane < Lane.COPIES))
        for span in self.spans:
            args: dict[str, object] = {"iteration": span.iteration}
            if span.posted is not None:
                args["posted_us"] = 1e3 * span.posted
            events.append(
                perfetto.slice_event(self.rank, span.lane, span.name, span.category, span.start, span.end, args)
            )
        return events

    @classmethod
    def from_json(cls, text: str) -> RankTrace:
        """Read a trace that `to_json` wrote.

        Raises ValueError, KeyError, TypeError, AttributeError or RecursionError for any other text.
        """
        document = json.loads(text)
        about = document["otherData"]
        return cls(
            run=about["run"],
            rank=int(about["rank"]),
            schedule=about["schedule"],
            vocab=about["vocab"],
            placement=tuple(map(tuple, about["placement"])),
            microbatches={int(iteration): int(count) for iteration, count in about["microbatches"].items()},
            clock_error=float(about["clock_error_ms"]),
            spans=tuple(_span(event) for event in document["traceEvents"] if event["ph"] == "X"),
            partition=Partition.of(about),
        )


def _span(event: dict) -> TracedSpan:
    start = event["ts"] / 1e3
    posted = event["args"].get("posted_us")
    return TracedSpan(
        iteration=event["args"]["iteration"],
        lane=Lane(event["tid"]),
        name=event["name"],
        category=event["cat"],
        start=start,
        end=start + event["dur"] / 1e3,
        posted=None if posted is None else posted / 1e3,
    )


def path_of(folder: Path, rank: int) -> Path:
    """The path of a rank's trace file."""
    return folder / f"rank_{rank}.json"


def read_traces(folder: Path) -> list[RankTrace]:
    """Read the traces of all ranks of the run in `folder`, in the order of ranks.

    Raises UserError if the folder does not exist, if a file is missing or is not a trace, or if the files are from
    different runs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the --pipeline-trace folder of a run")
    paths = sorted(folder.glob("rank_*.json"))
    if not paths:
        raise UserError(
            f"{folder} contains no traces (rank_*.json): wait until the run has finished a traced iteration"
        )
    traces = sorted(map(_read, paths), key=lambda trace: trace.rank)
    for one, other in pairwise(traces):
        if one.run != other.run:
            raise UserError(
                f"{folder} contains traces of different runs (ranks {one.rank} and {other.rank}): give each run an "
                "empty --pipeline-trace folder"
            )
        if one.microbatches != other.microbatches:
            raise UserError(
                f"{folder} contains different iterations for rank {one.rank} ({sorted(one.microbatches)}) and rank "
                f"{other.rank} ({sorted(other.microbatches)}): wait until the run has finished its traced iterations"
            )
    expected = len(traces[0].placement)
    if [trace.rank for trace in traces] != list(range(expected)):
        raise UserError(
            f"{folder} contains traces of ranks {[trace.rank for trace in traces]}, but the run has ranks 0 to "
            f"{expected - 1}: put the traces of all ranks into this folder"
        )
    return traces


def _read(path: Path) -> RankTrace:
    text = read_text(path, "trace", 512 * MIB)
    try:
        return RankTrace.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{path} is not a trace written by --pipeline-trace: give a folder that contains only traces"
        ) from None


def merge(traces: Sequence[RankTrace], extra: Sequence[perfetto.Event] = ()) -> str:
    """Merge the traces of all ranks, and `extra` events, into one Perfetto trace."""
    events = [event for trace in traces for event in trace.events()]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*events, *extra]})
