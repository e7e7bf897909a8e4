"""The instructions that a rank executes: read data, run a pass, call the loss, start an operation, or wait for one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_vp.schedule.ledger import peak
from megatron_vp.schedule.pass_kinds import Held
from megatron_vp.schedule.passes import Pass
from megatron_vp.schedule.transfers import Operation


@dataclass(frozen=True, slots=True)
class Run:
    """Compute a pass."""

    action: Pass

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class RunPair:
    """Compute a forward and the backward of another microbatch as one. In a schedule with W passes, the weight
    gradients of the layer that is computed last are left to a W behind the pair's messages.
    """

    forward: Pass
    backward: Pass

    def __str__(self) -> str:
        return f"{self.forward}|{self.backward}"


@dataclass(frozen=True, slots=True)
class _OfMicrobatch:
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__.upper()}:{self.microbatch}"


class Load(_OfMicrobatch):
    """Read the data of a microbatch: token ids on rank 0, labels on rank p-1."""


class Loss(_OfMicrobatch):
    """Call the loss function for a microbatch on rank p-1, and keep its gradient with respect to the token losses."""


@dataclass(frozen=True, slots=True)
class _OfOperation:
    operation: Operation

    def __str__(self) -> str:
        return f"{'+' if isinstance(self, Post) else '?'}{self.operation}"


class Post(_OfOperation):
    """Start this rank's part of an operation, without waiting for it."""


class Wait(_OfOperation):
    """Wait until the operation's result is on this rank."""


Instruction = Load | Run | RunPair | Loss | Post | Wait


def passes_of(instruction: Instruction) -> tuple[Pass, ...]:
    """The passes that an instruction computes, as they use memory: in a pair, the forward comes first."""
    match instruction:
        case Run(action):
            return (action,)
        case RunPair(forward, backward):
            return (forward, backward)
    return ()


def kind_of(instruction: Run | RunPair) -> str:
    """Under which name the time of a pass is reported; that of a pair, such as F|B, counts neither as F nor as B."""
    return "|".join(step.kind.value for step in passes_of(instruction))


@dataclass(frozen=True)
class Program:
    """The program that one rank executes."""

    rank: int
    instructions: tuple[Instruction, ...]
    vocab_members: tuple[int, ...]
    """the ranks that post the collectives; every rank's program lists the same ranks"""

    @cached_property
    def peaks(self) -> dict[Held, int]:
        """For each kind of memory, the largest number of pieces (see `ledger.py`) that the passes hold at once."""
        order = [step for each in self.instructions for step in passes_of(each)]
        return {held: peak(order, held) for held in Held}
