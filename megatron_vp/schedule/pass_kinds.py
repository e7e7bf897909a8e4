"""The kinds of pass: one entry per kind, with all the properties that the rest of the package uses.

A schedule may also list optional passes: O, R, and those of kinds added with `PassKind.define`. Each optional pass may
occur once per microbatch or, if its kind is `per_chunk`, once per microbatch and chunk. It waits for the passes that
its entry names, and takes no time unless the costs include its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, ClassVar

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


class _Table(type):
    """Makes `PassKind` behave like an enumeration to which entries can be added."""

    entries: dict[str, PassKind]

    def __iter__(cls) -> Iterator[PassKind]:
        return iter(cls.entries.values())

    def __contains__(cls, name: object) -> bool:
        return name in cls.entries

    def __call__(cls, name: str) -> PassKind:
        if name not in cls.entries:
            raise ValueError(f"{name!r} is not a pass; passes are {', '.join(cls.entries)}")
        return cls.entries[name]

    def __getattr__(cls, name: str) -> PassKind:
        raise AttributeError(f"there is no pass {name}; passes are {', '.join(cls.entries)}")


class PassKind(str, metaclass=_Table):
    """The kind of a pass. The entry for F is `PassKind.F` or `PassKind("F")`, and it equals the string "F"."""

    entries: ClassVar[dict[str, PassKind]] = {}

    meaning: str
    """what the pass does, in a few words"""
    colour: str
    mark: str
    """character for the pass in text drawings, by default the first of its name"""
    lane: str = "compute"
    """lane on which traces show the pass"""
    per_chunk: bool = False
    """whether a rank runs one such pass per chunk and microbatch; otherwise it runs one per microbatch"""
    forward: bool = False
    """whether evaluation runs the pass"""
    waits_for: tuple[str, ...] = ()
    """kinds of the passes that the pass waits for, on the same rank and for the same microbatch and chunk"""
    through: Through | None = None
    """makes an operation between the passes in `waits_for` and this pass; if None, this pass waits for them directly"""
    holds: tuple[Held, ...] = ()
    """memory that the pass allocates and still holds when it ends; if `through` is set, its operation fills this memory
    before the pass starts, so the passes in `waits_for` allocate the memory instead
    """
    filled_by: Through | None = None
    """function that makes the operation after the pass; this operation fills the memory in `holds`, and the pass that
    frees the memory waits for the operation
    """
    releases: tuple[Held, ...] = ()
    """memory that is freed when the pass ends, unless a later pass of the same microbatch and chunk also releases it"""

    @classmethod
    def define(cls, name: str, meaning: str, colour: str, **more: Any) -> PassKind:
        """Add an entry; `more` are the other attributes of the class. Raises ValueError if the name is in use."""
        if name in cls.entries:
            raise ValueError(f"pass {name} already exists")
        assert more.keys() <= cls.__annotations__.keys(), more
        kind = str.__new__(cls, name)
        vars(kind).update({"mark": name[0]} | more, meaning=meaning, colour=colour)
        cls.entries[name] = kind
        setattr(cls, name, kind)
        return kind

    @classmethod
    def remove(cls, name: str) -> None:
        """Remove an entry."""
        del cls.entries[name]
        delattr(cls, name)

    @property
    def value(self) -> str:
        """The name as a plain string."""
        return str.__str__(self)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return PassKind, (self.value,)


PassKind.define("IF", "embedding", "#B07AA1", mark="i", forward=True)
PassKind.define("F", "forward", "#4C78A8", per_chunk=True, forward=True, holds=(Held.ACTIVATIONS,))
PassKind.define("S", "output layer, first pass", "#F28E2B", forward=True, holds=(Held.LOGITS,))
PassKind.define("T", "output layer, second pass", "#EDC948", releases=(Held.LOGITS,))
PassKind.define("V", "vocabulary", "#E15759", forward=True)
_GIVEN = (Held.ACTIVATIONS, Held.HOST_ACTIVATIONS)
PassKind.define("B", "backward", "#59A14F", per_chunk=True, releases=_GIVEN)
PassKind.define("W", "weight gradient", "#B6C95B", per_chunk=True, waits_for=("B",), releases=(Held.ACTIVATIONS,))
PassKind.define("BW", "whole backward", "#3A7D34", mark="B", per_chunk=True, releases=_GIVEN)
PassKind.define("IB", "embedding gradient", "#D37295", mark="b")
PassKind.define(
    "O",
    "activations leave the device",
    "#7F7F7F",
    mark="o",
    per_chunk=True,
    waits_for=("F",),
    through=lambda rank, step: Copy(True, step.microbatch, step.chunk, rank),
    holds=(Held.HOST_ACTIVATIONS,),
    releases=(Held.ACTIVATIONS,),
)
PassKind.define(
    "R",
    "activations come back",
    "#4D4D4D",
    mark="r",
    per_chunk=True,
    waits_for=("O",),
    holds=(Held.ACTIVATIONS,),
    filled_by=lambda rank, step: Copy(False, step.microbatch, step.chunk, rank),
)
