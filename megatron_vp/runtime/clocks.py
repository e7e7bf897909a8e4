"""Aligns the clocks of a pipeline's ranks on one time axis, with an error bound.

No rank leaves an all-gather before every rank has entered it. Let `o` be the number to add to this rank's clock to get
rank 0's clock. Suppose that this rank enters and leaves an all-gather at times `enter` and `leave` on its own clock,
and that rank 0 does so at `enter_0` and `leave_0` on its own clock. Then `enter_0 - leave <= o <= leave_0 - enter`. A
few all-gathers narrow `o` down to an interval. Its midpoint is taken as `o`, and half its width bounds the error. Ranks
on rank 0's host read the same clock as rank 0, so their offset is exactly 0.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_vp.runtime.communicator import Communicator
from megatron_vp.runtime.groups import pipeline_device

_ROUNDS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Alignment:
    """Relates this rank's clock to rank 0's; all fields are in nanoseconds.

    offset: the number to add to this rank's `perf_counter_ns` to get rank 0's.
    error: bound on the error of `offset`.
    origin: a reference time on rank 0's clock; the same number on all ranks.
    wall: rank 0's `time_ns` at about the time `origin`; the same number on all ranks.
    """

    offset: int
    error: int
    origin: int
    wall: int


class Pipeline(Protocol):
    """Interface to a pipeline's ranks, implemented with our groups (`runtime.groups.PipelineGroups`) or Megatron's."""

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the pipeline, in pipeline order."""

    @property
    def rank(self) -> int:
        """This rank's position in the pipeline."""

    @property
    def pipeline(self) -> Communicator:
        """The communicator of all ranks of the pipeline."""


def align(groups: Pipeline) -> Alignment:
    """Compare this rank's clock with rank 0's. All pipeline ranks must call this while no schedule is running."""
    device = pipeline_device()
    ranks = len(groups.members)
    token = torch.zeros(1, device=device)
    tokens = token.new_zeros(ranks, 1)
    enter, leave = [], []
    for _ in range(_ROUNDS):
        enter.append(time.perf_counter_ns())
        groups.pipeline.all_gather(tokens, token)
        tokens.tolist()  # On a GPU, `tolist` makes the host wait for the all-gather.
        leave.append(time.perf_counter_ns())
    host = zlib.crc32(_BOOT.read_bytes()) if _BOOT.exists() else groups.rank
    own = torch.tensor([*enter, *leave, host, time.time_ns()], dtype=torch.int64, device=device)
    gathered = own.new_zeros(ranks, len(own))
    groups.pipeline.all_gather(gathered, own)
    *first, first_host, wall = gathered[0].tolist()
    enter_0, leave_0 = first[:_ROUNDS], first[_ROUNDS:]
    lowest = max(a - b for a, b in zip(enter_0, leave, strict=True))
    highest = min(a - b for a, b in zip(leave_0, enter, strict=True))
    if host == first_host and lowest <= 0 <= highest:
        return Alignment(0, 0, leave_0[-1], wall)
    return Alignment((lowest + highest) // 2, (highest - lowest) // 2, leave_0[-1], wall)
