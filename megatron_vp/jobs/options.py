"""What the commands know about Megatron's options, such as which a run refuses: the records of `options.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from megatron_vp.jobs.command_line import option_of

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RUNS: dict[str, str] = _FILE["runs"]
OTHER_NAMES: dict[str, str] = _FILE["other_names"]
SHORT_NAMES: dict[str, str] = _FILE["short_names"]
RANGES: dict[str, list[int]] = _FILE["ranges"]
UNREAD = "unread"
"""Stands for a property of RUNS if no code of Megatron reads an option."""
Values = Callable[[str], Any]
"""Gives the value of an argument by its long name; None if it is not set."""


@dataclass(frozen=True)
class Term:
    """A condition on one argument: `name` (set), `not name`, `name=VALUE|VALUE`, `name!=VALUE|VALUE` or `name>NUMBER`.

    A VALUE may also be the name of another argument. `unless name` is `not name`, but messages leave it out.
    """

    name: str
    sign: str
    wanted: str

    @classmethod
    def of(cls, text: str) -> Term:
        """Parse a condition."""
        name, sign, wanted = re.split(r"(!=|=|>|$)", text, maxsplit=1)
        absent, _, excluded = name.rpartition(" ")
        return cls(excluded, absent or sign, wanted)

    def holds(self, values: Values) -> bool:
        """Whether the arguments fulfil the condition."""
        value = values(self.name)
        listed = (value or [None]) if isinstance(value, list | tuple) else [value]
        each = [getattr(one, "name", one) for one in listed]
        if self.sign == ">":
            return (value or 0) > int(self.wanted)
        if self.sign in ("=", "!="):
            wanted = {str(one) for word in self.wanted.split("|") for one in (word, values(word) or word)}
            return any(str(one) in wanted for one in each) == (self.sign == "=")
        return any(each) == (self.sign == "")

    def said(self, values: Values) -> str:
        """The option in a message, with its value if the condition is about values."""
        if self.sign in ("", "not"):
            return option_of(self.name)
        value = values(self.name)
        return f"{option_of(self.name)} {self.wanted if isinstance(value, list) else value}"


@dataclass(frozen=True)
class Option:
    """What is special about some options, or about combinations of options."""

    given: str
    """Alternatives, separated by ` or `. Each is a list of Terms, separated by ` and `; `a/b` stands for either."""
    run: str = ""
    """A key of RUNS, or UNREAD. Empty if the options are only not counted."""
    why: str = ""
    instead: str = "leave it out"
    does: str = ""
    """What the options do instead of the intended effect, for a warning. Without it, the run is refused."""
    harmless: list[Any] | None = None
    """The values that change neither time nor memory, if the cost model does not count the options."""

    @cached_property
    def ways(self) -> list[list[Term]]:
        """The alternatives."""
        choices = [product(*(each.split("/") for each in way.split(" and "))) for way in self.given.split(" or ")]
        return [[Term.of(text) for text in choice] for each in choices for choice in each]

    def found(self, values: Values) -> str | None:
        """Name the options among a run's arguments, as the beginning of a message; None if they are not given."""
        ways = [way for way in self.ways if all(term.holds(values) for term in way)]
        if not ways:
            return None
        terms = [way[0] for way in ways] if all(len(way) == 1 for way in ways) else ways[0]
        without = " or ".join(term.said(values) for term in terms if term.sign == "not")
        given = " and ".join(term.said(values) for term in terms if term.sign not in ("not", "unless")) or "a job"
        return f"{given}{f' without {without}' * bool(without)}"

    def message(self, called: str, ours: str) -> str:
        """The refusal or the warning, with placeholders for arguments. `ours`: the flags of one of our schedules."""
        if self.run == UNREAD:
            return f"{called} has no effect, because no code of Megatron reads it: {self.instead}"
        if self.does:
            return f"{called} {self.does}{f' with {ours}' * bool(RUNS[self.run])}: {self.why}"
        verb = "is not supported" if RUNS[self.run] else "cannot work"
        return f"{RUNS[self.run]}{called} {verb}: {self.why}; {self.instead}"


OPTIONS = tuple(Option(**each) for each in _FILE["option"])
UNCOUNTED = {
    term.name: option.harmless
    for option in OPTIONS
    if option.harmless is not None
    for way in option.ways
    for term in way
}
"""The options whose effect on time or memory the cost model ignores, each with the values that have none."""
