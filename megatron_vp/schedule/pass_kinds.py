"""The kinds of pass: one entry per kind, with all the properties that the rest of the package uses.

A schedule may also list optional passes: O, R, and those of further kinds. Each optional pass may occur once per
microbatch or, if its kind is `per_chunk`, once per microbatch and chunk. It waits for the passes that its entry names,
and takes no time unless the costs include its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Self

from megatron_vp.schedule.transfers import Copy, Operation

Through = Callable[[int, Any], Operation]
"""Takes a rank and one of its passes, and makes an operation for the same microbatch."""


class Held(StrEnum):
    """Kinds of memory that stay in use from one pass of a microbatch to another."""

    ACTIVATIONS = "activations"
    """a chunk's activations, on the device"""
    LOGITS = "logits"
    """the exponentials E of the rank's logits, on the device, kept from S to T"""
    HOST_ACTIVATIONS = "host activations"
    """a copy of a chunk's activations in host memory"""


_DEFAULTS: Mapping[str, Any] = {
    "per_chunk": False,
    "forward": False,
    "waits_for": (),
    "through": None,
    "holds": (),
    "filled_by": None,
    "releases": (),
}
_GIVEN = (Held.ACTIVATIONS, Held.HOST_ACTIVATIONS)


class PassKind(StrEnum):
    """The kind of a pass: its name, its meaning in a few words, its colour, and further properties if it has any."""

    __hash__ = str.__hash__

    meaning: str
    colour: str
    per_chunk: bool
    """whether a rank runs one such pass per chunk and microbatch; otherwise it runs one per microbatch"""
    forward: bool
    """whether evaluation runs the pass"""
    waits_for: tuple[str, ...]
    """kinds of the passes that the pass waits for, on the same rank and for the same microbatch and chunk"""
    through: Through | None
    """makes an operation between the passes in `waits_for` and this pass; if None, this pass waits for them directly"""
    holds: tuple[Held, ...]
    """memory that the pass allocates and still holds when it ends; if `through` is set, its operation fills this memory
    before the pass starts, so the passes in `waits_for` allocate the memory instead
    """
    filled_by: Through | None
    """function that makes the operation after the pass; this operation fills the memory in `holds`, and the pass that
    frees the memory waits for the operation
    """
    releases: tuple[Held, ...]
    """memory that is freed when the pass ends, unless a later pass of the same microbatch and chunk also releases it"""

    def __new__(cls, name: str, meaning: str = "", colour: str = "", more: Mapping[str, Any] | None = None) -> Self:
        """Make an entry; `more` are the properties that differ from `_DEFAULTS`."""
        kind = str.__new__(cls, name)
        vars(kind).update(_DEFAULTS, meaning=meaning, colour=colour, _value_=name)
        vars(kind).update(more or {})
        return kind

    @classmethod
    def _missing_(cls, value: object) -> Self:
        raise ValueError(f"{value!r} is not a pass; passes are {', '.join(cls)}")

    IF = "IF", "embedding", "#B07AA1", {"forward": True}
    F = "F", "forward", "#4C78A8", {"per_chunk": True, "forward": True, "holds": (Held.ACTIVATIONS,)}
    S = "S", "output layer, first pass", "#F28E2B", {"forward": True, "holds": (Held.LOGITS,)}
    T = "T", "output layer, second pass", "#EDC948", {"releases": (Held.LOGITS,)}
    V = "V", "vocabulary", "#E15759", {"forward": True}
    B = "B", "backward", "#59A14F", {"per_chunk": True, "releases": _GIVEN}
    W = (
        "W",
        "weight gradient",
        "#B6C95B",
        {"per_chunk": True, "waits_for": ("B",), "releases": (Held.ACTIVATIONS,)},
    )
    BW = "BW", "whole backward", "#3A7D34", {"per_chunk": True, "releases": _GIVEN}
    IB = "IB", "embedding gradient", "#D37295"
    O = (  # noqa: E741
        "O",
        "activations leave the device",
        "#7F7F7F",
        {
            "per_chunk": True,
            "waits_for": ("F",),
            "through": lambda rank, step: Copy(True, step.microbatch, step.chunk, rank),
            "holds": (Held.HOST_ACTIVATIONS,),
            "releases": (Held.ACTIVATIONS,),
        },
    )
    R = (
        "R",
        "activations come back",
        "#4D4D4D",
        {
            "per_chunk": True,
            "waits_for": ("O",),
            "holds": (Held.ACTIVATIONS,),
            "filled_by": lambda rank, step: Copy(False, step.microbatch, step.chunk, rank),
        },
    )
