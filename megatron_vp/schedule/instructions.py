"""The instructions a rank executes: read data, run a pass, run the loss, start a communication, wait for one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatron_vp.schedule.passes import Pass


class Channel(StrEnum):
    """Point-to-point traffic; each (source, target, channel) is a communicator of its own."""

    __hash__ = str.__hash__  # see PassKind

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    LABELS = "labels"
    """with whole vocabulary layers: from rank p-1, which reads them, to the last stage where that is elsewhere"""
    TOKEN_LOSS = "token-loss"
    """with whole vocabulary layers: from the last stage to the loss function on rank p-1"""
    TOKEN_GRADIENT = "token-gradient"
    """with whole vocabulary layers: the loss function's gradient by token, back to the last stage"""


class CollectiveKind(StrEnum):
    """Operations of the vocabulary communicator, whose members are `Schedule.vocab_members`."""

    __hash__ = str.__hash__  # see PassKind

    TOKENS = "TOKENS"
    """tokens and labels of a microbatch to every member"""
    EMBED = "EMBED"
    """embedded rows from their owners to the first stage"""
    C0 = "C0"
    """the last stage's output to every member"""
    C1 = "C1"
    """softmax statistics of all shards; vocab-2 also reduces the input gradient to the last stage"""
    C2 = "C2"
    """vocab-1 only: the input gradient, reduced to the last stage"""
    LOSS_GRAD = "LOSS_GRAD"
    """the loss function's gradient by token loss, from rank p-1 to every member"""
    EMBED_GRAD = "EMBED_GRAD"
    """the first stage's input gradient, rows to their owners"""

    @classmethod
    def _missing_(cls, value: object) -> CollectiveKind | None:
        """Traces of earlier versions call LOSS_GRAD so."""
        return cls.LOSS_GRAD if value == "ROW_GRADIENT" else None


class Message(NamedTuple):
    """A tensor from one stage to another on another rank; `source` and `target` are ranks.

    The loss function counts as part of the last stage, also where it runs on another rank.
    """

    channel: Channel
    microbatch: int
    source_stage: int
    target_stage: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.channel}:{self.microbatch}[{self.source_stage}>{self.target_stage}]"


class Collective(NamedTuple):
    """One operation of all members; `root` is the rank it starts from or ends at."""

    kind: CollectiveKind
    microbatch: int
    root: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.microbatch}"


Operation = Message | Collective


def lane_key(operation: Operation) -> tuple:
    """The channel an operation travels on: one for all collectives, one for each directed edge and kind of message."""
    if isinstance(operation, Collective):
        return ("collectives",)
    return (operation.source, operation.target, operation.channel)


@dataclass(frozen=True, slots=True)
class Run:
    """Compute a pass."""

    action: Pass

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Load:
    """Read the data of a microbatch: token ids on rank 0, labels on rank p-1."""

    microbatch: int

    def __str__(self) -> str:
        return f"LOAD:{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Call the loss function of a microbatch, on rank p-1, and keep its gradient by token."""

    microbatch: int

    def __str__(self) -> str:
        return f"LOSS:{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Post:
    """Start this rank's part of an operation; returns at once."""

    operation: Operation

    def __str__(self) -> str:
        return f"+{self.operation}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until the operation's result is on this rank."""

    operation: Operation

    def __str__(self) -> str:
        return f"?{self.operation}"


Instruction = Load | Run | Loss | Post | Wait


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank executes."""

    rank: int
    instructions: tuple[Instruction, ...]
    collectives: tuple[Collective, ...]
    """in the order in which all members post them; empty on a rank that is not a member"""
    vocab_members: tuple[int, ...]
    """the ranks that post the collectives, the same in the programs of all ranks"""
