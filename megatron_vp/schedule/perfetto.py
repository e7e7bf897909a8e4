"""Makes Chrome trace events, which Perfetto opens, both for simulated timelines and for recorded runs.

Every rank is a process. Times are given in milliseconds; events have them in microseconds, as the format requires.
"""

from __future__ import annotations

from enum import IntEnum

from megatron_vp.schedule.pass_kinds import Held

Event = dict[str, object]


class Lane(IntEnum):
    """Threads of a rank's process; from LINKS on, there is one for each link that leaves the rank."""

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
    """The events that name a rank's process and the given lanes."""
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        *(thread(rank, lane, lane.title) for lane in lanes),
    ]


def thread(rank: int, lane: int, title: str) -> Event:
    """The event that names a lane."""
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
