"""Operations that ranks start and later wait for: messages, collectives and copies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol, Self


class Channel(StrEnum):
    """Kinds of point-to-point traffic; each (source, target, channel) has its own communicator."""

    __hash__ = str.__hash__

    content: str
    """Description of the data that a rank waits for."""

    def __new__(cls, value: str, content: str) -> Self:
        """Create a channel with a description of its data."""
        channel = str.__new__(cls, value)
        channel._value_, channel.content = value, content
        return channel

    ACTIVATION = "activation", "F"
    GRADIENT = "gradient", "B"
    LABELS = "labels", "the labels"
    """Labels that rank p-1 sends to a last stage on another rank if the vocabulary layers are not split."""
    TOKEN_LOSS = "token-loss", "the token losses"
    """Token losses that this last stage sends to the loss function on rank p-1."""
    TOKEN_GRADIENT = "token-gradient", "the gradient of the token losses"
    """The gradient with respect to these token losses, which rank p-1 sends back in training."""


class Origin(Enum):
    """The ranks whose data a collective waits for."""

    READERS = auto()
    """Rank 0, which reads token ids, and rank p-1, which reads labels."""
    ROOT = auto()
    ALL = auto()


class CollectiveKind(StrEnum):
    """Operations of the vocabulary communicator, whose members are `Schedule.vocab_members`."""

    __hash__ = str.__hash__

    origin: Origin

    def __new__(cls, value: str, origin: Origin) -> Self:
        """Create a kind of collective with its origin."""
        kind = str.__new__(cls, value)
        kind._value_, kind.origin = value, origin
        return kind

    TOKENS = "TOKENS", Origin.READERS
    """Sends a microbatch's tokens and labels to every member."""
    EMBED = "EMBED", Origin.ALL
    """Sends embedded rows from their owners to the first stage and, with multi-token prediction, to the last stage."""
    C0 = "C0", Origin.ROOT
    """Sends the last stage's output to every member."""
    C1 = "C1", Origin.ALL
    """Gathers the softmax statistics of all shards; vocab-2 also reduces the input gradient to the last stage."""
    C2 = "C2", Origin.ALL
    """Reduces the input gradient to the last stage (vocab-1 only)."""
    LOSS_GRAD = "LOSS_GRAD", Origin.ROOT
    """Sends the loss function's gradient with respect to token losses from rank p-1 to every member."""
    EMBED_GRAD = "EMBED_GRAD", Origin.ROOT
    """Sends gradients of the embedded rows back from the receivers of EMBED to the rows' owners."""

    @classmethod
    def _missing_(cls, value: object) -> CollectiveKind | None:
        """Accept ROW_GRADIENT, the name of LOSS_GRAD in older traces."""
        return cls.LOSS_GRAD if value == "ROW_GRADIENT" else None


class Operation(Protocol):
    """Interface of every kind of operation.

    A kind is a NamedTuple with a field `microbatch`. `str` of an operation is unique in its schedule.
    """

    @property
    def microbatch(self) -> int:
        """The microbatch that the operation belongs to."""

    @property
    def follows_step(self) -> bool:
        """Whether the members post the operation right after the step that produces its data.

        If False, every member posts the operations of the lane in the same order.
        """

    @property
    def lane(self) -> str:
        """Name of the operation's lane; the operations of a lane run one after another."""

    @property
    def cost(self) -> str:
        """Name of the operation's duration in `PassCosts`."""

    @property
    def per_chunk(self) -> bool:
        """Whether the operation takes the duration in `PassCosts` divided by the number of chunks per rank."""

    @property
    def timing_key(self) -> Hashable:
        """The key of the operation's duration in `StageCosts`."""

    @property
    def category(self) -> str:
        """The category of the operation's slices in traces."""

    @property
    def track(self) -> tuple[int, str] | None:
        """The rank and track title under which traces show the operation; None for the second stream of all members."""

    def members(self, vocab_members: Sequence[int]) -> Sequence[int]:
        """The ranks that post the operation. `vocab_members` take part in the vocabulary collectives."""

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the data that a waiting rank needs, and its sources; rank r is shown with the number `ranks[r]`."""

    def _replace(self, *, microbatch: int) -> Self:
        """Return this operation with another microbatch."""


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
    def follows_step(self) -> bool:
        """True: the sender posts a message after the step that produces it."""
        return True

    @property
    def lane(self) -> str:
        """One lane per directed edge and channel."""
        return f"{self.source}>{self.target} {self.channel}"

    @property
    def cost(self) -> str:
        """The cost named `comm`, which all messages and collectives share."""
        return "comm"

    @property
    def per_chunk(self) -> bool:
        """False: all messages have the same duration."""
        return False

    @property
    def timing_key(self) -> tuple[int, int, Channel]:
        """Edge and channel."""
        return (self.source, self.target, self.channel)

    @property
    def category(self) -> str:
        """The category named `message`."""
        return "message"

    @property
    def track(self) -> tuple[int, str]:
        """One track per lane, on the sender."""
        return self.source, f"{self.channel} to rank {self.target}"

    def members(self, vocab_members: Sequence[int]) -> tuple[int, int]:
        """The sender and the receiver."""
        return (self.source, self.target)

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the data and its sender."""
        return f"{self.channel.content} of microbatch {self.microbatch} from rank {ranks[self.source]}"


class Collective(NamedTuple):
    """A collective operation of all members; `root` is the one rank that sends or receives, if there is one."""

    kind: CollectiveKind
    microbatch: int
    root: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.microbatch}"

    @property
    def follows_step(self) -> bool:
        """False: a collective does not follow a single step, so members post collectives in the lane's order."""
        return False

    @property
    def lane(self) -> str:
        """One lane for all collectives."""
        return "collectives"

    @property
    def cost(self) -> str:
        """The cost named `comm`, which all messages and collectives share."""
        return "comm"

    @property
    def per_chunk(self) -> bool:
        """False: all collectives have the same duration."""
        return False

    @property
    def timing_key(self) -> CollectiveKind:
        """The kind of collective."""
        return self.kind

    @property
    def category(self) -> str:
        """The category named `collective`."""
        return "collective"

    @property
    def track(self) -> None:
        """None: traces show collectives on the second stream."""

    def members(self, vocab_members: Sequence[int]) -> Sequence[int]:
        """All ranks that take part in the vocabulary collectives."""
        return vocab_members

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the collective and the ranks whose data it waits for."""
        match self.kind.origin:
            case Origin.READERS:
                sources = f"ranks {ranks[0]} and {ranks[-1]}"
            case Origin.ROOT:
                sources = f"rank {ranks[self.root]}"
            case Origin.ALL:
                sources = "all ranks"
        return f"{self.kind} of microbatch {self.microbatch} from {sources}"


class Copy(NamedTuple):
    """A copy of a chunk's activations to host memory or back; both directions of a rank share one lane.

    Copies run in the order in which the rank posts them (PipeOffload, arXiv 2503.01328, section 4.2).
    """

    to_host: bool
    microbatch: int
    chunk: int
    rank: int

    def __str__(self) -> str:
        return f"copy-{'out' if self.to_host else 'in'}:{self.microbatch}.{self.chunk}[{self.rank}]"

    @property
    def follows_step(self) -> bool:
        """True: a copy-out follows the forward, and a copy-back follows the pass R."""
        return True

    @property
    def lane(self) -> str:
        """One lane per rank."""
        return f"copies of rank {self.rank}"

    @property
    def cost(self) -> str:
        """The cost named `copy`, which both directions share."""
        return "copy"

    @property
    def per_chunk(self) -> bool:
        """True: a copy moves one chunk."""
        return True

    @property
    def timing_key(self) -> tuple[bool, int, int]:
        """Direction, rank and chunk."""
        return (self.to_host, self.rank, self.chunk)

    @property
    def category(self) -> str:
        """The category named `copy`."""
        return "copy"

    @property
    def track(self) -> tuple[int, str]:
        """One track per rank."""
        return self.rank, "copies to and from the host"

    def members(self, vocab_members: Sequence[int]) -> tuple[int]:
        """Only the rank itself."""
        return (self.rank,)

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the copy and its direction."""
        way = "to the host" if self.to_host else "back from the host"
        return f"the copy of microbatch {self.microbatch} (chunk {self.chunk}) {way} on rank {ranks[self.rank]}"
