"""Run programs written by `megatron-vp schedule --format programs`, on devices whose hosts may wait for them.

This is independent of the project's own validator: it reads only the JSON, and models CUDA. A host issues its
instructions one after the other. Passes and waits go to the compute stream, which runs them in order. The part of an
operation that a rank posts starts once the compute stream has done everything issued before the post, and once the
previous operation on its lane is complete. An operation is complete when the parts of all its members have started.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from enum import Enum


class HostWaits(Enum):
    """When a host waits until its device has done everything that was issued."""

    NEVER = "never"
    AROUND_PASSES = "before and after every pass, as Megatron's timers of level 2 do"
    ALWAYS = "after every instruction, as with CUDA_LAUNCH_BLOCKING=1"


def stuck_ranks(text: str, waits: HostWaits) -> dict[int, str]:
    """The ranks that never end, and the instruction that each cannot get past; empty for programs that end."""
    programs = json.loads(text)["programs"]
    members = {each["operation"]: each["members"] for program in programs for each in program if each["do"] != "run"}
    ranks = [_Rank(program, waits) for program in programs]
    started: dict[str, int] = defaultdict(int)
    complete: set[str] = set()
    while True:
        moved = False
        for rank in ranks:
            for operation in rank.advance(complete):
                started[operation] += 1
                if started[operation] == len(members[operation]):
                    complete.add(operation)
            moved |= rank.moved
        if not moved:
            return {number: str(rank.at()) for number, rank in enumerate(ranks) if not rank.over()}


class _Rank:
    def __init__(self, program: list[dict], waits: HostWaits) -> None:
        self.program, self.waits = program, waits
        self.issued = 0
        self.host_waits = False
        self.compute: deque[tuple[int, str | None]] = deque()  # place, and the operation that it waits for
        self.lanes: dict[str, deque[tuple[int, str]]] = defaultdict(deque)  # place of the post, operation
        self.running: dict[str, str] = {}  # of each lane, the operation that this rank has started
        self.moved = True

    def over(self) -> bool:
        return self.issued == len(self.program) and self.idle()

    def idle(self) -> bool:
        return not self.compute and not self.running and not any(self.lanes.values())

    def at(self) -> object:
        return self.program[self.compute[0][0] if self.compute else min(self.issued, len(self.program) - 1)]

    def advance(self, complete: set[str]) -> list[str]:
        """Everything that this rank can do now; returns the operations whose part it has started."""
        found: list[str] = []
        self.moved = False
        while self._step(complete, found):
            self.moved = True
        return found

    def _step(self, complete: set[str], found: list[str]) -> bool:
        if self.compute and (self.compute[0][1] is None or self.compute[0][1] in complete):
            self.compute.popleft()
            return True
        for lane, running in list(self.running.items()):
            if running in complete:
                del self.running[lane]
                return True
        for lane, posted in self.lanes.items():
            behind = self.compute[0][0] if self.compute else len(self.program)
            if posted and lane not in self.running and posted[0][0] < behind:
                self.running[lane] = posted.popleft()[1]
                found.append(self.running[lane])
                return True
        if self.issued == len(self.program) or (self.host_waits and not self.idle()):
            return False
        instruction = self.program[self.issued]
        if self.waits is HostWaits.AROUND_PASSES and instruction["do"] == "run" and not self.host_waits:
            self.host_waits = True
            return True
        if instruction["do"] == "post":
            self.lanes[instruction["lane"]].append((self.issued, instruction["operation"]))
        else:
            self.compute.append((self.issued, instruction.get("operation")))
        self.host_waits = self.waits is HostWaits.ALWAYS or (
            self.waits is HostWaits.AROUND_PASSES and instruction["do"] == "run"
        )
        self.issued += 1
        return True
