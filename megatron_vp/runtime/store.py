"""Keeps an iteration's tensors between the passes and the communication that produce and consume them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from megatron_vp.schedule.pass_kinds import Held


class Slot(Enum):
    """The kinds of value in the store, with their producers and consumers.

    A producer or consumer such as TOKENS or C1 is a collective (`CollectiveKind`). X is the output layer's input, dX
    its gradient, and g the loss function's gradient with respect to token losses. Sizes: s positions, b sequences,
    hidden size h, V/p rows of a shard, e positions of `Shapes.token_ids`, `outputs` rows of the last stage's output,
    `sp_size` sequence-parallel ranks, and r embedding rows that this rank owns and the microbatch uses. Floats have the
    model's dtype unless another one is given. Messages carry ACTIVATION, GRADIENT, LABELS, TOKEN_LOSS and
    TOKEN_GRADIENT to other ranks.
    """

    ACTIVATION = auto()
    """A chunk's input [s / sp_size, b, h], keyed by the stage that reads it. Produced by F of the previous stage;
    consumed by F.
    """
    GRADIENT = auto()
    """The gradient of a chunk's output [s / sp_size, b, h], keyed by the stage that reads it. Produced by B of the next
    stage; consumed by B.
    """
    CHUNK_GRAPH = auto()
    """Both ends of a chunk's autograd graph, keyed by chunk: the leaf (None if the chunk embeds its tokens) and the
    output. Produced by F or R; consumed by B or O.
    """
    OFFLOADED_GRAPH = auto()
    """The value of CHUNK_GRAPH while the chunk's activations are in host memory. Produced by O; consumed by R."""
    ON_HOST = auto()
    """Host memory of a chunk's activations (`HostMemory`), keyed by chunk. Produced when the copy to the host is
    posted; consumed when the copy-back has been awaited.
    """
    LEFT_FOR_W = auto()
    """Marks a weight gradient that B left to W, keyed by chunk. Produced by B; consumed by W."""

    TOKENS = auto()
    """Token ids, int64 [b, e], on rank 0. Produced when the microbatch is loaded; consumed by the collective TOKENS."""
    LABELS = auto()
    """Labels, int64 [b, e], on rank p-1. Produced when the microbatch is loaded; consumed by the collective TOKENS. If
    another rank holds an unsharded output layer, labels are keyed by the last stage and consumed by its F.
    """

    TOKEN_LOSS = auto()
    """With unsharded vocabulary layers: the loss of every token, fp32 [b, s]. Produced by F of the last stage; consumed
    by the loss function.
    """
    TOKEN_GRADIENT = auto()
    """With unsharded vocabulary layers: the loss function's gradient with respect to token losses, fp32 [b, s].
    Produced by the loss function; consumed by B of the last stage.
    """

    ROW_EXCHANGE = auto()
    """The rank that owns the embedding row of each token (`RowExchange`). Produced by TOKENS; consumed by IF, EMBED,
    EMBED_GRAD and IB.
    """
    TARGETS = auto()
    """Label of every row of the last stage's output, int64 [outputs]. Produced by TOKENS; consumed by S."""
    OWN_ROWS = auto()
    """Embedding rows that this rank owns [r, h]. Produced by IF; consumed by EMBED."""
    EMBEDDING = auto()
    """Embedding rows of all tokens [b e, h]. Produced by EMBED; consumed by F of the first stage."""
    MTP_EMBEDDING = auto()
    """Embedding rows [b e, h] for multi-token prediction. Produced by EMBED; consumed by F of the last stage."""
    MTP_LEAF = auto()
    """MTP_EMBEDDING as an autograd leaf. Produced by F of the last stage; consumed by B of the last stage."""
    EMBEDDING_GRAD = auto()
    """Gradient of EMBEDDING. Produced by B of the first stage; consumed by EMBED_GRAD."""
    MTP_EMBEDDING_GRAD = auto()
    """Gradient of MTP_EMBEDDING. Produced by B of the last stage; consumed by EMBED_GRAD."""
    OWN_ROW_GRADS = auto()
    """Gradients of OWN_ROWS from each stage that uses embeddings, [1 or 2, r, h]. Produced by EMBED_GRAD; consumed by
    IB.
    """

    LAST_OUTPUT = auto()
    """This rank's rows of the last stage's output, [outputs / sp_size, h]. Produced by F of the last stage; consumed by
    C0.
    """
    X = auto()
    """The last stage's full output [outputs, h]. Produced by C0; consumed by S."""
    PENDING_OUTPUT = auto()
    """The state that S leaves for C1 and T: the matrices E [outputs, V/p] and X, and statistics (`PendingOutput`).
    Produced by S; consumed by C1 and T.
    """
    UNSCALED_GRAD = auto()
    """With vocab-2: this shard's part of dX / g before rescaling, [outputs, h]. Produced by S; consumed by C1."""
    GRAD_PART = auto()
    """With vocab-1: this shard's part of dX / g, [outputs, h]. Produced by T; consumed by C2."""
    STATISTICS = auto()
    """Softmax statistics over the whole vocabulary, fp32 [outputs] each (`GlobalStatistics`). Produced by C1; consumed
    by T and, on rank p-1, by the loss function.
    """
    OUTPUT_GRAD = auto()
    """This rank's rows of dX / g on the last stage, [outputs / sp_size, h]. Produced by C1 (vocab-2) or C2 (vocab-1);
    consumed by B of the last stage.
    """
    OWN_LOSS_GRAD = auto()
    """g on rank p-1, fp32 [outputs]. Produced by the loss function; consumed by the collective LOSS_GRAD."""
    LOSS_GRAD = auto()
    """g on every rank that uses it, fp32 [outputs]. Produced by the collective LOSS_GRAD; consumed by T and by B of the
    last stage.
    """


HOLDS = {
    Slot.CHUNK_GRAPH: Held.ACTIVATIONS,
    Slot.LEFT_FOR_W: Held.ACTIVATIONS,
    Slot.ON_HOST: Held.HOST_ACTIVATIONS,
    Slot.PENDING_OUTPUT: Held.LOGITS,
}
"""For each slot whose values count towards a memory peak: the kind of memory that a value occupies."""

Key = tuple[Slot, int, int | None]
"""The slot, the microbatch, and the stage or chunk (None if the slot is keyed by neither)."""


class Occupancy:
    """Counts the stored values that occupy one kind of memory, and remembers the largest count."""

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
    """Holds an iteration's values, keyed by slot and microbatch.

    No value may be overwritten or left behind, because a later microbatch or iteration would then use a wrong value.
    """

    def __init__(self) -> None:
        self._values: dict[Key, tuple[Any, int]] = {}
        self.held = {held: Occupancy() for held in Held}

    def put(self, slot: Slot, microbatch: int, value: Any, *, at: int | None = None, uses: int = 1) -> None:
        """Store a new value until it has been taken `uses` times; `at` is the value's stage or chunk."""
        key = _key(slot, microbatch, at)
        assert key not in self._values, f"{_words(key)} is already in the store"
        if uses:
            self._values[key] = (value, uses)
            if slot in HOLDS:
                self.held[HOLDS[slot]].enter()

    def take(self, slot: Slot, microbatch: int, *, at: int | None = None) -> Any:
        """Return a value, and remove it if this is the last use."""
        key = _key(slot, microbatch, at)
        assert key in self._values, f"{_words(key)} is not in the store: it was taken too early or too often"
        value, uses = self._values.pop(key)
        if uses > 1:
            self._values[key] = (value, uses - 1)
        elif slot in HOLDS:
            self.held[HOLDS[slot]].leave()
        return value

    def look(self, slot: Slot, microbatch: int, *, at: int | None = None) -> Any:
        """Return a value that stays in the store."""
        return self._values[_key(slot, microbatch, at)][0]

    def assert_empty(self) -> None:
        """Check that no value is left at the end of an iteration."""
        assert not self._values, (
            f"values were left in the store at the end of an iteration: {sorted(map(_words, self._values))}"
        )

    def assert_peaks(self, promised: Mapping[Held, int]) -> None:
        """For each kind of memory, check that the largest number of pieces held at once equals the peak in
        `Program.peaks`.
        """
        for held, peak in promised.items():
            found = self.held[held].peak
            assert found == peak, (
                f"the iteration held {held} of {found} microbatches at once, but its program expects {peak}"
            )


def _key(slot: Slot, microbatch: int, at: int | None) -> Key:
    return (slot, microbatch, at)


def _words(key: Key) -> str:
    slot, microbatch, at = key
    return f"{slot.name} of microbatch {microbatch}" + ("" if at is None else f" at {at}")
