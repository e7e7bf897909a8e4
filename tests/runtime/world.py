"""The devices of all ranks of a pipeline (`device_double`), each with a host that may wait until its device is idle.

An operation starts when all operations that it was ordered after have ended. A kernel ends as soon as it has started. A
message or a collective ends when all its members have started it, and occupies its device until then, as NCCL's kernels
do. Hosts take turns: each continues until it waits for something that has not ended. If all hosts wait, that is a
deadlock.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

from tests.runtime.device_double import Cause, Clock, Device, Meeting, passed


class Hang(AssertionError):
    """Every host waits for its device, and no device can go on."""


class World:
    """What `ranks` devices have been given to do, and how far they are.

    Args:
        causes: for which the hosts wait.
        probability: with which they do, each time.
    """

    def __init__(self, ranks: int, causes: frozenset[Cause], probability: float = 1, seed: int = 0) -> None:
        self.devices = [Device(seed + rank, self) for rank in range(ranks)]
        self.held = 0
        """How often a host waited for something that was not over."""
        self._causes, self._probability, self._random = causes, probability, Random(seed)
        self._issued: list[dict[int, list[tuple[Clock, object, int]]]] = [defaultdict(list) for _ in range(ranks)]
        self._over: list[Counter[int]] = [Counter() for _ in range(ranks)]
        self._started: list[set[int]] = [set() for _ in range(ranks)]
        self._met: list[Counter[object]] = [Counter() for _ in range(ranks)]
        self._arrived: Counter[object] = Counter()
        self._waiting: dict[int, Clock] = {}
        self._ended: set[int] = set()
        self._failure: BaseException | None = None
        self._turn, self._turns = 0, threading.Condition()

    def run(self, rank_main: Callable[[int, Device], None]) -> None:
        """Let every rank run in a thread of its own; raises what the first of them raised, or Hang."""
        threads = [threading.Thread(target=self._rank, args=(rank_main, rank)) for rank in range(len(self.devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        self._advance()
        left = [rank for rank, issued in enumerate(self._issued) if not self.over(self.devices[rank], _all(issued))]
        if left:
            raise Hang(f"the devices of ranks {left} never get done")

    def waits(self, device: Device, cause: Cause) -> bool:
        """Whether the host of `device` waits now."""
        chosen = cause in self._causes and not device.may_wait
        return chosen and (self._probability == 1 or self._random.random() < self._probability)

    def issue(self, device: Device, stream: int, after: Clock, meeting: Meeting | None) -> None:
        """A host has given its device something to do, behind all that `after` knows."""
        rank = self.devices.index(device)
        key, members = None, 0
        if meeting is not None:
            group, members = meeting
            key = (group, self._met[rank][group])
            self._met[rank][group] += 1
        self._issued[rank][stream].append((after, key, members))

    def over(self, device: Device, clock: Clock) -> bool:
        """Whether the device has done all that `clock` knows."""
        return passed(self._over[self.devices.index(device)], clock)

    def hold(self, device: Device, clock: Clock) -> None:
        """The host of `device` waits until that has done all that `clock` knows."""
        rank = self.devices.index(device)
        self._advance()
        if self.over(device, clock):
            return
        self.held += 1
        self._waiting[rank] = dict(clock)
        with self._turns:
            self._pass_on()
            self._turns.wait_for(lambda: self._turn == rank or self._failure is not None)
        del self._waiting[rank]
        if self._failure is not None:
            raise Hang("another rank failed") from self._failure

    def _rank(self, rank_main: Callable[[int, Device], None], rank: int) -> None:
        with self._turns:
            self._turns.wait_for(lambda: self._turn == rank or self._failure is not None)
        try:
            if self._failure is None:
                rank_main(rank, self.devices[rank])
        except BaseException as error:
            self._failure = self._failure or error
        with self._turns:
            self._ended.add(rank)
            self._pass_on()

    def _pass_on(self) -> None:
        """It is the turn of a host that can go on."""
        self._advance()
        for rank, device in enumerate(self.devices):
            if rank not in self._ended and (rank not in self._waiting or self.over(device, self._waiting[rank])):
                self._turn = rank
                break
        else:
            if len(self._ended) < len(self.devices) and self._failure is None:
                self._failure = Hang(f"the hosts of ranks {sorted(self._waiting)} wait for their devices for ever")
        self._turns.notify_all()

    def _advance(self) -> None:
        """Let the devices do what they can."""
        moved = True
        while moved:
            moved = False
            for rank, issued in enumerate(self._issued):
                for stream, operations in issued.items():
                    while self._over[rank][stream] < len(operations):
                        after, key, members = operations[self._over[rank][stream]]
                        if stream not in self._started[rank]:
                            if not passed(self._over[rank], after):
                                break
                            self._started[rank].add(stream)
                            self._arrived[key] += 1
                            moved = True
                        if key is not None and self._arrived[key] < members:
                            break
                        self._started[rank].discard(stream)
                        self._over[rank][stream] += 1
                        moved = True


def _all(issued: dict[int, list[object]]) -> Clock:
    return {stream: len(operations) for stream, operations in issued.items()}
