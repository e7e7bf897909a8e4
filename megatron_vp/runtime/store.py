"""Keeps an iteration's tensors between the passes and the communication that produce and consume them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from megatron_vp.schedule.pass_kinds import Held


class Slot(Enum):
    """The kinds of tensor in the store, with their producers and consumers.

    Names in capitals such as TOKENS or C1 are collectives (`CollectiveKind`). Sizes: s positions, b sequences, hidden
    size h, V/p rows of a shard, e positions of `Shapes.token_ids`, `outputs` rows of the last stage's output
    (`Shapes.outputs`), and r embedding rows that this rank owns and the microbatch uses. "Model dtype" is the dtype of
    activations.
    """

    ACTIVATION = auto()
    """A chunk's input [s, b, h], model dtype, keyed by the stage that reads it. Put by F of the previous stage, or by
    the wait for its message; taken by F, or by the post that sends it.
    """
    GRADIENT = auto()
    """The gradient of a chunk's output [s, b, h], model dtype, keyed by the stage that reads it. Put by B of the next
    stage, or by the wait for its message; taken by B, or by the post that sends it.
    """
    CHUNK_GRAPH = auto()
    """A chunk's input, which is a leaf of autograd's graph (None for a chunk that embeds its tokens), and its output,
    where the graph ends; keyed by chunk. Put by F, taken by B.
    """
    OFFLOADED_GRAPH = auto()
    """CHUNK_GRAPH of a chunk whose activations are in the host's memory. Put by O, taken by R."""
    ON_HOST = auto()
    """Host memory of a chunk's activations (`HostSlot`), keyed by chunk. Put by the instruction that
    posts the copy to the host, taken by the instruction that waits for the copy back.
    """
    LEFT_FOR_W = auto()
    """Marks a weight gradient that B left to W; keyed by chunk. The value is not a tensor, because the model keeps what
    W needs. Put by B, taken by W.
    """

    TOKENS = auto()
    """Token ids, int64 [b, e], on rank 0. Put by the load of the microbatch, taken by TOKENS."""
    LABELS = auto()
    """Labels, int64 [b, e]. Put by the load of the microbatch on rank p-1, taken by TOKENS. If another rank holds a
    whole output layer, labels are keyed by the last stage, taken by the post that sends them there, put by the wait for
    their message, and taken by F of the last stage.
    """

    TOKEN_LOSS = auto()
    """With whole vocabulary layers: the loss of every token, fp32 [b, s]. Put by F of the last stage, or by the wait
    for the message; taken by the loss function, or by the post that sends it.
    """
    TOKEN_GRADIENT = auto()
    """With whole vocabulary layers: the loss function's gradient with respect to token losses, fp32 [b, s]. Put by the
    loss function, or by the wait for the message; taken by B of the last stage, or by the post that sends it.
    """

    ROW_EXCHANGE = auto()
    """The owning rank of each of the microbatch's tokens (`RowExchange`). Put by TOKENS; taken by IF, EMBED and, unless
    the embedding is frozen, by EMBED_GRAD and IB.
    """
    TARGETS = auto()
    """Label of every row of the last stage's output, int64 [outputs]. Put by TOKENS, taken by S."""
    OWN_ROWS = auto()
    """Embedding rows that this rank owns [r, h], model dtype. Put by IF, taken by EMBED."""
    EMBEDDING = auto()
    """Embedding rows of all tokens [b e, h], model dtype, on the first stage. Put by EMBED, taken by F of the first
    stage.
    """
    MTP_EMBEDDING = auto()
    """Like EMBEDDING, for multi-token prediction on the last stage. Put by EMBED, taken by F of the last stage."""
    MTP_LEAF = auto()
    """MTP_EMBEDDING as a leaf of autograd's graph. Put by F of the last stage, taken by its B."""
    EMBEDDING_GRAD = auto()
    """Gradient of EMBEDDING [b e, h], model dtype. Put by B of the first stage, taken by EMBED_GRAD; absent if the
    embedding is frozen.
    """
    MTP_EMBEDDING_GRAD = auto()
    """Gradient of MTP_EMBEDDING [b e, h], model dtype. Put by B of the last stage, taken by EMBED_GRAD; absent if the
    embedding is frozen.
    """
    OWN_ROW_GRADS = auto()
    """Gradients of OWN_ROWS, one from each stage that uses the embeddings: [1 or 2, r, h], model dtype; none if the
    embedding is frozen. Put by EMBED_GRAD, taken by IB.
    """

    LAST_OUTPUT = auto()
    """This rank's rows of the last stage's output [outputs / sequence-parallel ranks, h], model dtype. Put by F of the
    last stage, taken by C0.
    """
    X = auto()
    """The last stage's whole output [outputs, h], model dtype. Put by C0, taken by S."""
    PENDING_OUTPUT = auto()
    """The state that S leaves for C1 and T: E [outputs, V/p], X and statistics (`PendingOutput`). Put by S; taken by C1
    and T.
    """
    UNSCALED_GRAD = auto()
    """With vocab-2: this shard's part of dX / g before it is rescaled, [outputs, h], model dtype. Put by S, taken by
    C1.
    """
    GRAD_PART = auto()
    """With vocab-1: this shard's part of dX / g, [outputs, h], model dtype. Put by T, taken by C2."""
    STATISTICS = auto()
    """Softmax statistics over the whole vocabulary, fp32 [outputs] each (`GlobalStatistics`). Put by C1; taken by T
    and, on rank p-1, by the loss function."""
    OUTPUT_GRAD = auto()
    """dX / g on the last stage, this rank's rows [outputs / sequence-parallel ranks, h], model dtype. Put by C1
    (vocab-2) or C2 (vocab-1), taken by B of the last stage.
    """
    OWN_LOSS_GRAD = auto()
    """g as the loss function returned it, fp32 [outputs], on rank p-1. Put by the loss function, taken by the
    collective LOSS_GRAD.
    """
    LOSS_GRAD = auto()
    """g on every rank, fp32 [outputs]. Put by the collective LOSS_GRAD; taken by T and by B of the last
    stage."""


HOLDS = {
    Slot.CHUNK_GRAPH: Held.ACTIVATIONS,
    Slot.LEFT_FOR_W: Held.ACTIVATIONS,
    Slot.ON_HOST: Held.HOST_ACTIVATIONS,
    Slot.PENDING_OUTPUT: Held.LOGITS,
}
"""For each slot, the kind of memory in the schedule's ledger that a stored value occupies."""

Key = tuple[Slot, int, int | None]
"""The slot, the microbatch, and the stage or chunk for slots that are keyed by one."""


class Occupancy:
    """Counts values that come and go, and remembers the largest count."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def enter(self) -> None:
        """Add one to the count."""
        self.now += 1
        self.peak = max(self.peak, self.now)

    def leave(self) -> None:
        """Subtract one from the count."""
        self.now -= 1


class Store:
    """Values by slot and microbatch.

    No value may be overwritten or left behind, because a later microbatch or iteration would then use a wrong one.
    """

    def __init__(self) -> None:
        self._values: dict[Key, tuple[Any, int]] = {}
        self.held = {held: Occupancy() for held in Held}

    def put(self, slot: Slot, microbatch: int, value: Any, *, at: int | None = None, uses: int = 1) -> None:
        """Keep a new value until it has been taken `uses` times; `at` is its stage or chunk."""
        key = _key(slot, microbatch, at)
        assert key not in self._values, f"{_words(key)} is already in the store"
        if uses:
            self._values[key] = (value, uses)
            if slot in HOLDS:
                self.held[HOLDS[slot]].enter()

    def take(self, slot: Slot, microbatch: int, *, at: int | None = None) -> Any:
        """Return a value; its last use removes it."""
        key = _key(slot, microbatch, at)
        assert key in self._values, f"{_words(key)} is not in the store: it was taken too early or too often"
        value, uses = self._values.pop(key)
        if uses > 1:
            self._values[key] = (value, uses - 1)
        elif slot in HOLDS:
            self.held[HOLDS[slot]].leave()
        return value

    def assert_empty(self) -> None:
        """Check that no value is left at the end of an iteration."""
        assert not self._values, (
            f"values were left in the store at the end of an iteration: {sorted(map(_words, self._values))}"
        )

    def assert_peaks(self, promised: Mapping[Held, int]) -> None:
        """Check that the iteration's peaks equal the peaks of its program's passes; see `Program.peaks`."""
        for held, peak in promised.items():
            found = self.held[held].peak
            assert found == peak, (
                f"the iteration held {held} of {found} microbatches at once, but its program expects {peak}"
            )


def _key(slot: Slot, microbatch: int, at: int | None) -> Key:
    if not isinstance(slot, Slot):
        raise TypeError(f"{slot!r} is not a slot of the store: add a member to Slot")
    return (slot, microbatch, at)


def _words(key: Key) -> str:
    slot, microbatch, at = key
    return f"{slot.name} of microbatch {microbatch}" + ("" if at is None else f" at {at}")
