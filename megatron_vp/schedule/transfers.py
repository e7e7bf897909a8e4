"""Operations that ranks start and later wait for: messages, collectives and copies."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from megatron_vp.schedule.placement import Placement


class Channel(StrEnum):
    """Kinds of point-to-point traffic; each (source, target, channel) has its own communicator."""

    __hash__ = str.__hash__

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    LABELS = "labels"
    """Labels that rank p-1 sends to the last stage if this stage is on another rank and the vocabulary layers are not
    split.
    """
    TOKEN_LOSS = "token-loss"
    """Token losses that the last stage sends to the loss function, which runs on rank p-1."""
    TOKEN_GRADIENT = "token-gradient"
    """The gradient with respect to the token losses. In training, rank p-1 sends it back to the last stage."""


CONTENT = {
    Channel.ACTIVATION: "F",
    Channel.GRADIENT: "B",
    Channel.LABELS: "the labels",
    Channel.TOKEN_LOSS: "the token losses",
    Channel.TOKEN_GRADIENT: "the gradient of the token losses",
}
"""What the receiver waits for: the sender's pass or the data itself."""


class CollectiveKind(StrEnum):
    """Operations of the vocabulary communicator, whose members are `Schedule.vocab_members`."""

    __hash__ = str.__hash__

    TOKENS = "TOKENS"
    """Sends a microbatch's tokens and labels to every member."""
    EMBED = "EMBED"
    """Sends embedding rows from their owners to the first stage and, with multi-token prediction, to the last stage."""
    C0 = "C0"
    """Sends the last stage's output to every member."""
    C1 = "C1"
    """Gathers all shards' softmax statistics. With vocab-2, it also reduces the input gradient to the last stage."""
    C2 = "C2"
    """Reduces the input gradient to the last stage (vocab-1 only)."""
    LOSS_GRAD = "LOSS_GRAD"
    """Rank p-1 sends every member the gradient of the loss function with respect to the token losses."""
    EMBED_GRAD = "EMBED_GRAD"
    """Sends gradients of the embedding rows back from the receivers of EMBED to the rows' owners."""


class Message(NamedTuple):
    """A tensor sent from one stage to another on a different rank; `source` and `target` are ranks.

    The loss function counts as part of the last stage, even if it runs on another rank.
    """

    channel: Channel
    microbatch: int
    source_stage: int
    target_stage: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.channel}:{self.microbatch}[{self.source_stage}>{self.target_stage}]"

    @property
    def lane(self) -> str:
        """One lane per directed edge and channel."""
        return f"{self.source}>{self.target} {self.channel}"

    @property
    def timing_key(self) -> tuple[int, int, Channel]:
        """Edge and channel."""
        return (self.source, self.target, self.channel)

    def members(self, vocab_members: Sequence[int]) -> tuple[int, ...]:
        """The sender and the receiver."""
        return (self.source, self.target)

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the data and its sender."""
        return f"{CONTENT[self.channel]} of microbatch {self.microbatch} from rank {ranks[self.source]}"


class Collective(NamedTuple):
    """A collective operation of all `Schedule.vocab_members`. If only one rank sends or receives, it is `root`."""

    kind: CollectiveKind
    microbatch: int
    root: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.microbatch}"

    @property
    def lane(self) -> str:
        """All collectives share one lane."""
        return "collectives"

    @property
    def timing_key(self) -> CollectiveKind:
        """The kind of collective."""
        return self.kind

    def members(self, vocab_members: Sequence[int]) -> Sequence[int]:
        """All ranks that take part in the vocabulary collectives."""
        return vocab_members

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the collective and the ranks whose data it waits for."""
        match self.kind:
            case CollectiveKind.TOKENS:
                sources = f"ranks {ranks[0]} and {ranks[-1]}"
            case CollectiveKind.C0 | CollectiveKind.LOSS_GRAD | CollectiveKind.EMBED_GRAD:
                sources = f"rank {ranks[self.root]}"
            case _:
                sources = "all ranks"
        return f"{self.kind} of microbatch {self.microbatch} from {sources}"


class Copy(NamedTuple):
    """A copy of a chunk's activations to host memory or back.

    A copy to the host is posted after its pass F, and a copy back after its pass R. A rank's copies in both directions
    run one at a time, in the order in which the rank posts them (PipeOffload, arXiv 2503.01328, section 4.2).
    """

    to_host: bool
    microbatch: int
    chunk: int
    rank: int

    def __str__(self) -> str:
        return f"copy-{'out' if self.to_host else 'in'}:{self.microbatch}.{self.chunk}[{self.rank}]"

    @property
    def lane(self) -> str:
        """All copies of a rank share one lane."""
        return f"copies of rank {self.rank}"

    @property
    def timing_key(self) -> tuple[bool, int, int]:
        """Direction, rank and chunk."""
        return (self.to_host, self.rank, self.chunk)

    def members(self, vocab_members: Sequence[int]) -> tuple[int, ...]:
        """Only the rank itself."""
        return (self.rank,)

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the copy and its direction."""
        rank = f"rank {ranks[self.rank]}"
        way = f"from {rank} to the host" if self.to_host else f"from the host to {rank}"
        return f"the activations of microbatch {self.microbatch} (chunk {self.chunk}) {way}"


Operation = Message | Collective | Copy
"""A named tuple with a field `microbatch`, whose `str` is unique in its schedule, and with these properties:

lane: the operations of a lane run one after another.
timing_key: the key of the operation's duration in `StageCosts`.
members: the ranks that post the operation; `vocab_members` take part in the vocabulary collectives.
words: describes the data that a waiting rank needs, and its sources; rank r is shown as `ranks[r]`.

The members post a message or a copy right after the step that produces its data. They post collectives in one order.
"""


def category_of(operation: Operation) -> str:
    """The kind of an operation in pictures and traces: message, collective or copy."""
    return type(operation).__name__.lower()


CHANNELS = 4
"""Maximum number of NCCL channels (thread blocks) that an operation on one of our communicators may use."""

Edge = tuple[int, int, Channel]
"""Source rank, target rank, and the kind of data that is sent. Each edge has its own communicator."""


def all_edges(placement: Placement, sharded: bool) -> set[Edge]:
    """All directed edges that schedules with this `placement` use.

    If the vocabulary layers are not `sharded`, three more edges connect the last stage to the loss function on rank
    p-1, unless rank p-1 holds the last stage.
    """
    seats = [(placement.rank_of(stage), placement.rank_of(stage + 1)) for stage in range(placement.stages - 1)]
    edges = {
        edge
        for here, there in seats
        if here != there
        for edge in ((here, there, Channel.ACTIVATION), (there, here, Channel.GRADIENT))
    }
    end, loss = placement.last_rank, placement.ranks - 1
    if not sharded and end != loss:
        edges |= {(loss, end, Channel.LABELS), (end, loss, Channel.TOKEN_LOSS), (loss, end, Channel.TOKEN_GRADIENT)}
    return edges
