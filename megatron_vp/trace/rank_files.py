"""Defines the files of a recorded run, one Perfetto trace per rank, and reads, checks and merges these files.

All ranks measure time from the same starting point, so traces are merged by concatenating their events. Data that
Perfetto does not show (the run, the schedule, the clock error) is stored under the key `otherData`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.schedule import perfetto
from megatron_vp.schedule.perfetto import Lane

COLLECTIVE = "collective"
LOSS = "loss"
LOAD = "load"
WAIT = "wait"
"""Categories of all spans except passes; the category of a pass is its kind, such as F."""

_NAMES = ("run", "rank", "schedule", "vocab")
_LANES = (Lane.COMPUTE, Lane.SECOND_STREAM, Lane.WAITS, Lane.COPIES)


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """One activity of a rank in a traced iteration.

    The span is a pass (named `F12`), a loss (`LOSS:3`), a read of data (`LOAD:3`), a collective (`C1:3`), a copy to the
    host or back (`copy-out:3.1[0]`), or a wait, which is named after what it waits for. Times are in milliseconds.
    """

    iteration: int
    lane: Lane
    name: str
    category: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Milliseconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True)
class RankTrace:
    """One rank's recording; all fields except `rank` and `spans` are the same on all ranks of a run.

    placement: the virtual stages of each rank, as in a schedule.
    microbatches: the number of microbatches in each traced iteration.
    spans: everything recorded, in order of start.
    """

    run: str
    rank: int
    schedule: str
    vocab: str
    placement: tuple[tuple[int, ...], ...]
    microbatches: dict[int, int]
    spans: tuple[TracedSpan, ...]

    @property
    def pipeline_size(self) -> int:
        """The number of pipeline ranks."""
        return len(self.placement)

    def to_json(self) -> str:
        """Format this trace as Perfetto JSON, which `from_json` reads back."""
        about = {name: getattr(self, name) for name in (*_NAMES, "placement", "microbatches")}
        return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": self.events()})

    def events(self) -> list[perfetto.Event]:
        """All events of the trace: the names of the rank and its lanes, and a slice for each span."""
        used = {span.lane for span in self.spans}
        events = perfetto.process(self.rank, *(lane for lane in _LANES if lane in used or lane < Lane.COPIES))
        for span in self.spans:
            what, args = (span.name, span.category, span.start, span.end), {"iteration": span.iteration}
            events.append(perfetto.slice_event(self.rank, span.lane, *what, args))
        return events

    @classmethod
    def of(cls, document: Any) -> RankTrace:
        """Read a trace from the JSON object that `to_json` wrote.

        Raises ValueError, KeyError, TypeError or AttributeError for any other object.
        """
        about = document["otherData"]
        return cls(
            **{name: about[name] for name in _NAMES},
            placement=tuple(map(tuple, about["placement"])),
            microbatches={int(iteration): int(count) for iteration, count in about["microbatches"].items()},
            spans=tuple(_span(event) for event in document["traceEvents"] if event["ph"] == "X"),
        )


def _span(event: dict) -> TracedSpan:
    start = event["ts"] / 1e3
    return TracedSpan(
        iteration=event["args"]["iteration"],
        lane=Lane(event["tid"]),
        name=event["name"],
        category=event["cat"],
        start=start,
        end=start + event["dur"] / 1e3,
    )


def path_of(folder: Path, rank: int) -> Path:
    """The path of a rank's trace file."""
    return folder / f"rank_{rank}.json"


def read_traces(folder: Path) -> list[RankTrace]:
    """Read the traces of all ranks of the run in `folder`, in the order of ranks. Raises UserError."""
    traces = read_ranks(folder, RankTrace.of, "--pipeline-trace")
    for one, other in pairwise(traces):
        if one.microbatches != other.microbatches:
            raise UserError(
                f"{folder} contains different iterations for rank {one.rank} ({sorted(one.microbatches)}) and rank "
                f"{other.rank} ({sorted(other.microbatches)}): wait until the run has finished its traced iterations"
            )
    return traces


def read_ranks(folder: Path, of: Callable[[Any], Any], option: str) -> list[Any]:
    """Read the files of all ranks that a run wrote to `folder` with `option`, in the order of ranks.

    `of` reads a rank's JSON object, and raises KeyError, TypeError, ValueError or AttributeError for a malformed one.
    Raises UserError if a file is missing or cannot be read, or if the files are from different runs.
    """
    paths = sorted(folder.glob("rank_*.json"))
    if not paths:
        raise UserError(
            f"{folder} contains no rank_*.json: give the {option} folder of a run that has finished an iteration"
        )
    found = {}
    for path in paths:
        text = read_text(path, f"file of {option}", 512 * MIB)
        try:
            each = of(json.loads(text))
            found[int(each.rank)] = each
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise UserError(
                f"{path} is truncated, or is not a file that {option} of this version of megatron_vp writes: give a "
                "folder that contains only such files"
            ) from None
    files = [found[rank] for rank in sorted(found)]
    for one, other in pairwise(files):
        if any(getattr(one, name) != getattr(other, name) for name in ("run", "schedule", "vocab")):
            raise UserError(
                f"{folder} contains files of different runs (ranks {one.rank} and {other.rank}): give each run an "
                f"empty {option} folder"
            )
    expected = files[0].pipeline_size
    if sorted(found) != list(range(expected)) or len(paths) != expected:
        raise UserError(
            f"{folder} contains {len(paths)} files, of ranks {sorted(found)}, but the run has ranks 0 to "
            f"{expected - 1}: give a folder with one file of each rank"
        )
    return files


def merge(traces: Sequence[RankTrace]) -> str:
    """Merge the traces of all ranks into one Perfetto trace."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [event for trace in traces for event in trace.events()]})
