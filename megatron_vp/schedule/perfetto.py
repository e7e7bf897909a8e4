"""Makes Chrome trace events for Perfetto, both for simulated timelines and for recorded runs.

Perfetto shows every rank as a process. The functions accept times in milliseconds. The events contain microseconds, as
the format requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from megatron_vp.schedule.pass_kinds import Held

Event = dict[str, object]


class Lane(IntEnum):
    """Lanes of a rank, shown as threads; the links that leave the rank have lanes numbered from LINKS on."""

    COMPUTE = 0
    SECOND_STREAM = 1
    WAITS = 2
    COPIES = 3
    LINKS = 4

    @property
    def title(self) -> str:
        """The name that Perfetto shows."""
        return self.name.lower().replace("_", " ")


def process(rank: int, *lanes: Lane) -> list[Event]:
    """The events that set the names of a rank's process and of the given lanes."""
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        *(thread(rank, lane, lane.title) for lane in lanes),
    ]


def thread(rank: int, lane: int, title: str) -> Event:
    """The event that sets a lane's name."""
    return {"ph": "M", "pid": rank, "tid": int(lane), "name": "thread_name", "args": {"name": title}}


def slice_event(
    rank: int, lane: int, name: str, category: str, start: float, end: float, args: Mapping[str, object]
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


def level(rank: int, held: Held, time: float, level: float) -> Event:
    """The event that sets a rank's counter of held activations to `level` microbatches."""
    counter = {"ph": "C", "pid": rank, "name": held.value, "ts": 1e3 * time}
    return counter | {"args": {"microbatches": level}}
