"""Tracks where a rank is in its schedule, and describes the position if the rank cannot continue.

The executor records its current instruction in an attribute of `Progress`. The watchdog
(`megatron_vp.runtime.watchdog`) polls `Progress` to learn how long a rank has made no progress.

On CUDA, the host runs ahead of the device. After every wait, the rank therefore records a CUDA event, called a mark, on
the compute stream, and keeps the mark until the device has passed it. Only the main thread queries the marks. The
watchdog makes no CUDA call, because a CUDA call can block in the driver, and PyTorch's `Event.query` holds the
interpreter lock while it blocks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_vp.errors import PeerLost, UserError, printable
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Run, RunPair, Wait
from megatron_vp.schedule.transfers import Operation

_POSITION = re.compile(r"^\[[^]]*\.(cc|h|cpp):\d+\] ")
"""Matches the source file and line at the start of a backend's error text."""
_GLOO = re.compile("/gloo/|pair closure")
_NCCL = re.compile(r"^(?=.*\bNCCL\b)(?=.*(fail|error|abort|timed out|timeout))", re.IGNORECASE)
"""Matches the error text of a failed operation in PyTorch's newer NCCL backend, which raises a plain RuntimeError for
most failures. Other errors that mention NCCL, such as one about an unknown dtype, are bugs and keep their traceback.
"""
_LOCAL = re.compile(r"\bNCCL\b.*\b(unhandled cuda error|invalid usage|invalid argument)\b")
"""Matches NCCL errors whose cause is on this rank, such as too little memory, two ranks on one device, or an illegal
access. PyTorch's older and newer NCCL backends both quote these texts of `ncclGetErrorString` in the first line of an
error.
"""
_CAUSE = re.compile(r"^Last error:\n(.+)|^NCCL Last Error: (.+)", re.MULTILINE)
"""Matches NCCL's last error message: the line after the heading `Last error:` (older backend), or the text after `NCCL
Last Error:` (newer backend).
"""


FINISHING = "waited for its last messages to be received"
"""Recorded after a program's last instruction, when this rank's last messages may still be in transit."""
AGREEING = "waited for what the other ranks' forward_step asks for"
"""Recorded before a program's first instruction, while the ranks compare what their loop requests."""
_HOSTS_OWN = (Load, Run, RunPair, Loss)
"""Instructions in which the host itself may stall, whatever its device is doing."""


class Progress:
    """The current activity of one pipeline rank.

    Args:
        members: global ranks of the pipeline, in pipeline order.
        rank: this rank's position among them.
        finished: counts the iterations that the device has finished (`streams.CudaIterations`); None if the host never
            runs ahead of the device.
    """

    def __init__(self, members: tuple[int, ...], rank: int, finished: Any = None) -> None:
        self.members = members
        self.rank = rank
        self.iteration = 0
        """Number of schedules started."""
        self.instruction: Instruction | str | None = None
        """The host's current instruction; None outside a schedule."""
        self.behind: Wait | None = None
        """The first wait that the device had not passed when the marks were last queried; None if there was none."""
        self.others: Callable[[], str] = str
        """Names the ranks that hold up the pipeline; called if a connection breaks. A watchdog sets this function."""
        self._marks: deque[tuple[Wait, Any]] = deque()
        self._finished = finished

    @contextmanager
    def schedule(self, *, begins: bool = True) -> Iterator[None]:
        """Wrap one iteration or, without `begins`, what comes before it. A lost connection raises PeerLost. Other
        errors, except UserError, get a note that says what this rank was doing.
        """
        self.iteration += begins
        try:
            yield
            if begins and self._finished is not None:
                self._finished.add()
        except UserError:
            raise
        except Exception as error:
            reason = lost_peer(error)
            if reason is not None:
                raise PeerLost(f"{self.sentence()}: {reason}{self.others()}") from error
            error.add_note(self.sentence())
            raise
        finally:
            self.instruction = None

    def at(self, instruction: Instruction | str) -> None:
        """Record that the host is at `instruction`, and query the device's marks; for the main thread only."""
        self.instruction = instruction
        if self._marks:
            while self._marks and self._marks[0][1].done():
                self._marks.popleft()
            self.behind = self._marks[0][0] if self._marks else None

    def mark(self, wait: Wait, mark: Any) -> None:
        """Add the mark (`streams.CudaEvent`) that was recorded after the instruction `wait`. The host may be several
        microbatches ahead of the device.
        """
        self._marks.append((wait, mark))
        if self.behind is None:
            self.behind = wait

    def place(self) -> tuple[int, Instruction | str | None]:
        """A value that changes whenever this rank makes progress."""
        iteration, at, behind = self.iteration, self.instruction, self.behind
        if at is None and (self._finished is None or self._finished.count() >= self.iteration):
            behind = None  # Marks are not queried outside a schedule, so `behind` is out of date.
        return iteration, at if isinstance(at, _HOSTS_OWN) else behind or at

    def sentence(self) -> str:
        """Describe what this rank was doing, as in "rank 1 was ..."."""
        _, at = self.place()
        said, behind = self._words(at), self.behind
        if isinstance(at, _HOSTS_OWN) and behind is not None:
            said += f", ahead of its device, last seen waiting for {self._named(behind.operation)}"
        return f"rank {self.members[self.rank]} {said}"

    def _words(self, at: Instruction | str | None) -> str:
        match at:
            case Wait(operation):
                return f"waited for {self._named(operation)}"
            case Run(action):
                return f"was in pass {action.kind} of microbatch {action.microbatch}"
            case RunPair(forward, backward):
                both = f"{forward.kind} of microbatch {forward.microbatch} and {backward.kind} of {backward.microbatch}"
                return f"was in passes {both}"
            case Loss(microbatch):
                return f"was in the loss function of microbatch {microbatch}"
            case Load(microbatch):
                return f"was reading the data of microbatch {microbatch}"
            case Post(operation):
                return f"was starting the transfer of {self._named(operation)}"
        return str(at or "was outside the pipeline schedule")

    def _named(self, operation: Operation) -> str:
        return operation.words(self.members)


def lost_peer(error: Exception) -> str | None:
    """Summarise a backend's error about a lost or silent peer in a few words; return None for any other error."""
    said = str(error).strip()
    first_line = said.partition("\n")[0]
    # Search the error text, because gloo has no exception class of its own, and the newer NCCL backend uses its own
    # class only for timeouts.
    by_name = _GLOO.search(said) or (isinstance(error, RuntimeError) and _NCCL.search(first_line))
    if _LOCAL.search(first_line) or not (by_name or isinstance(error, dist.DistError)):
        return None
    reason = _POSITION.sub("", first_line).partition(". ")[0].strip()
    cause = _CAUSE.search(said)
    return f"{reason} ({printable(cause[1] or cause[2])})" if cause else reason
