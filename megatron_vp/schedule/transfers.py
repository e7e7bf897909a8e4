"""Operations that ranks start and later wait for: messages, collectives and copies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol, Self


class Channel(StrEnum):
    """Kinds of point-to-point traffic; each (source, target, channel) has its own communicator."""

    __hash__ = str.__hash__

    content: str
    """Name of what the receiver waits for: the sender's pass or the data itself."""

    def __new__(cls, value: str, content: str) -> Self:
        """Create a channel with its content."""
        channel = str.__new__(cls, value)
        channel._value_, channel.content = value, content
        return channel

    ACTIVATION = "activation", "F"
    GRADIENT = "gradient", "B"
    LABELS = "labels", "the labels"
    """Labels that rank p-1 sends to the last stage if this stage is on another rank and the vocabulary layers are not
    split.
    """
    TOKEN_LOSS = "token-loss", "the token losses"
    """Token losses that the last stage sends to the loss function, which runs on rank p-1."""
    TOKEN_GRADIENT = "token-gradient", "the gradient of the token losses"
    """The gradient with respect to the token losses. In training, rank p-1 sends it back to the last stage."""


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
    """Sends embedding rows from their owners to the first stage and, with multi-token prediction, to the last stage."""
    C0 = "C0", Origin.ROOT
    """Sends the last stage's output to every member."""
    C1 = "C1", Origin.ALL
    """Gathers all shards' softmax statistics. With vocab-2, it also reduces the input gradient to the last stage."""
    C2 = "C2", Origin.ALL
    """Reduces the input gradient to the last stage (vocab-1 only)."""
    LOSS_GRAD = "LOSS_GRAD", Origin.ROOT
    """Rank p-1 sends every member the gradient of the loss function with respect to the token losses."""
    EMBED_GRAD = "EMBED_GRAD", Origin.ROOT
    """Sends gradients of the embedding rows back from the receivers of EMBED to the rows' owners."""

    @classmethod
    def _missing_(cls, value: object) -> CollectiveKind | None:
        """Accept ROW_GRADIENT, the name of LOSS_GRAD in older traces."""
        return cls.LOSS_GRAD if value == "ROW_GRADIENT" else None


class Operation(Protocol):
    """Interface of the operations `Message`, `Collective` and `Copy`.

    All three are NamedTuples with a field `microbatch`. `str` of an operation is unique in its schedule.
    """

    @property
    def microbatch(self) -> int:
        """The microbatch that the operation belongs to."""

    @property
    def follows_step(self) -> bool:
        """Whether the members post the operation right after the step that produces its data.

        If False, all members post the operations with this `lane` in the same order.
        """

    @property
    def lane(self) -> str:
        """Name of the operation's lane; the operations of a lane run one after another."""

    @property
    def cost(self) -> str:
        """Name of the operation's duration in `PassCosts`."""

    @property
    def per_chunk(self) -> bool:
        """Whether to divide the operation's duration in `PassCosts` by the number of chunks per rank."""

    @property
    def timing_key(self) -> Hashable:
        """The key of the operation's duration in `StageCosts`."""

    @property
    def category(self) -> str:
        """The category of the operation's slices in traces."""

    @property
    def track(self) -> tuple[int, str] | None:
        """The rank and title of the operation's own track in traces; None if traces show it on every member's second
        stream.
        """

    def members(self, vocab_members: Sequence[int]) -> Sequence[int]:
        """The ranks that post the operation. `vocab_members` take part in the vocabulary collectives."""

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the data that a waiting rank needs, and the sources of the data. Rank r is shown as `ranks[r]`."""

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
        """Always True: the sender posts a message after the step that produces it."""
        return True

    @property
    def lane(self) -> str:
        """One lane per directed edge and channel."""
        return f"{self.source}>{self.target} {self.channel}"

    @property
    def cost(self) -> str:
        """Name of the duration that all messages and collectives have in `PassCosts`."""
        return "comm"

    @property
    def per_chunk(self) -> bool:
        """False: a message's duration is not divided by the number of chunks."""
        return False

    @property
    def timing_key(self) -> tuple[int, int, Channel]:
        """Edge and channel."""
        return (self.source, self.target, self.channel)

    @property
    def category(self) -> str:
        """The category of messages in traces."""
        return "message"

    @property
    def track(self) -> tuple[int, str]:
        """The sending rank, and a title that names the channel and the receiver."""
        return self.source, f"{self.channel} to rank {self.target}"

    def members(self, vocab_members: Sequence[int]) -> tuple[int, int]:
        """The sender and the receiver."""
        return (self.source, self.target)

    def words(self, ranks: Sequence[int]) -> str:
        """Describe the data and its sender."""
        return f"{self.channel.content} of microbatch {self.microbatch} from rank {ranks[self.source]}"


class Collective(NamedTuple):
    """A collective operation of all `Schedule.vocab_members`. If only one rank sends or receives, it is `root`."""

    kind: CollectiveKind
    microbatch: int
    root: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.microbatch}"

    @property
    def follows_step(self) -> bool:
        """Always False: every member posts all collectives in the same order."""
        return False

    @property
    def lane(self) -> str:
        """All collectives share one lane."""
        return "collectives"

    @property
    def cost(self) -> str:
        """Name of the duration that all messages and collectives have in `PassCosts`."""
        return "comm"

    @property
    def per_chunk(self) -> bool:
        """False: a collective's duration is not divided by the number of chunks."""
        return False

    @property
    def timing_key(self) -> CollectiveKind:
        """The kind of collective."""
        return self.kind

    @property
    def category(self) -> str:
        """The category of collectives in traces."""
        return "collective"

    @property
    def track(self) -> None:
        """None: traces show a collective on the second stream of every member."""

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
    """A copy of a chunk's activations to host memory or back.

    A rank's copies in both directions run one at a time, in the order in which the rank posts them (PipeOffload, arXiv
    2503.01328, section 4.2).
    """

    to_host: bool
    microbatch: int
    chunk: int
    rank: int

    def __str__(self) -> str:
        return f"copy-{'out' if self.to_host else 'in'}:{self.microbatch}.{self.chunk}[{self.rank}]"

    @property
    def follows_step(self) -> bool:
        """Always True: a copy to the host is posted after its pass F, and a copy back after its pass R."""
        return True

    @property
    def lane(self) -> str:
        """All copies of a rank share one lane."""
        return f"copies of rank {self.rank}"

    @property
    def cost(self) -> str:
        """Name of a copy's duration in `PassCosts`, the same for both directions."""
        return "copy"

    @property
    def per_chunk(self) -> bool:
        """True: a copy moves the activations of one chunk."""
        return True

    @property
    def timing_key(self) -> tuple[bool, int, int]:
        """Direction, rank and chunk."""
        return (self.to_host, self.rank, self.chunk)

    @property
    def category(self) -> str:
        """The category of copies in traces."""
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
        rank = f"rank {ranks[self.rank]}"
        way = f"from {rank} to the host" if self.to_host else f"from the host to {rank}"
        return f"the activations of microbatch {self.microbatch} (chunk {self.chunk}) {way}"
