"""Makes Chrome trace events for Perfetto, both for simulated timelines and for recorded runs.

Perfetto shows every rank as a process. The functions accept times in milliseconds. The events contain microseconds, as
the format requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

Event = dict[str, object]


class Lane(IntEnum):
    """Lanes of a rank, shown as threads."""

    COMPUTE = 0
    SECOND_STREAM = 1
    WAITS = 2
    COPIES = 3

    @property
    def title(self) -> str:
        """The name that Perfetto shows."""
        return self.name.lower().replace("_", " ")


def process(rank: int, *lanes: Lane) -> list[Event]:
    """The events that set the names of a rank's process and of the given lanes."""
    named = {"ph": "M", "pid": rank, "name": "thread_name"}
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        *({**named, "tid": int(lane), "args": {"name": lane.title}} for lane in lanes),
    ]


def slice_event(
    rank: int, lane: Lane, name: str, category: str, start: float, end: float, args: Mapping[str, object]
) -> Event:
    """The event for work that occupies a lane from `start` to `end`."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": int(lane),
        "name": name,
        "cat": category,
        "ts": 1e3 * start,
        "dur": 1e3 * (end - start),
        "args": args,
    }
