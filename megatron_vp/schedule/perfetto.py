"""Chrome trace events, which Perfetto opens: the shape that a simulated timeline and a recorded run share.

One process per rank; times are given in milliseconds and stand in the events in microseconds, as the format wants.
"""

from __future__ import annotations

from enum import IntEnum

from megatron_vp.schedule.pass_kinds import Held

Event = dict[str, object]


class Lane(IntEnum):
    """Threads of a rank's process; those from LINKS on are one for each link that leaves the rank."""

    COMPUTE = 0
    SECOND_STREAM = 1
    WAITS = 2
    COPIES = 3
    LINKS = 4

    @property
    def title(self) -> str:
        """As Perfetto shows it."""
        return self.name.lower().replace("_", " ")


def process(rank: int, *lanes: Lane) -> list[Event]:
    """Names of a rank's process and of those of its lanes that hold slices."""
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        *(thread(rank, lane, lane.title) for lane in lanes),
    ]


def thread(rank: int, lane: int, title: str) -> Event:
    """Name of a lane."""
    return {"ph": "M", "pid": rank, "tid": int(lane), "name": "thread_name", "args": {"name": title}}


def slice_event(
    rank: int, lane: int, name: str, category: str, start: float, end: float, args: dict[str, object]
) -> Event:
    """Something that occupies a lane from `start` to `end`, in milliseconds."""
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
    """Microbatches whose activations a rank holds from `time` (milliseconds) on, on the device or in host memory."""
    counter = {"ph": "C", "pid": rank, "name": held.value, "ts": 1e3 * time}
    return counter | {"args": {"microbatches": level}}
