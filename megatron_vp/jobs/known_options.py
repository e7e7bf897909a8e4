"""Looks up the options that a training script accepts, for commands that read a job without loading Megatron.

The list is in `known_options.jsonl` in this folder: a line for each option, with its names and the arguments of
argparse's `add_argument`. `known_options_SERIES.jsonl` has the options that a later series of Megatron releases adds.
`scripts/known_options.py` writes these files, and a test compares them with the parser of the
installed Megatron. If the installed Megatron is older than the list, commands accept options that training refuses.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import CPU, name_of, option_of
from megatron_vp.jobs.options import RANGES, SHORT_NAMES

_FILES = sorted(Path(__file__).parent.glob("known_options*.jsonl"), key=lambda path: path.stem)


def pattern(text: str) -> int | str:
    """The value of an option like `--moe-layer-freq`: an integer, or a Python list such as `[0]*3+[1]*29`."""
    return text if re.fullmatch(r"[,\d\[\]()+*]*\[[,\d\[\]()+*]*", text) else int(text)


def integers(text: str) -> list[int]:
    """The value of `--window-size`: integers between commas."""
    return [int(each) for each in text.strip("()").split(",")]


_TYPES: dict[str, Callable[[str], Any]] = {
    **{"int": int, "float": float, "bool": bool, "text": str, "pattern": pattern, "integers": integers}
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors. If an option is unknown, the error names the nearest known option.

    commands_own: the calling command's own options, which may be suggested too.
    """

    commands_own: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        unknown = message.partition("unrecognized arguments: ")[2].split("=")[0].split()
        if unknown and unknown[0].startswith("--"):
            known = [name_of(option) for option in self._option_string_actions if option.startswith("--")]
            nearest = nearest_name(name_of(unknown[0]), [*self.commands_own, *known])
            message += f"; the nearest known option is {option_of(nearest)}"
        elif unknown:
            message = f"{unknown[0]!r} is not a flag or a flag's value: leave it out; a configuration file comes first"
        raise UserError(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except KeyError:  # From Megatron's enumerations, where argparse expects a ValueError.
            raise argparse.ArgumentError(action, f"invalid choice: {arg_string!r}") from None


@cache
def listed_parser() -> Parser:
    """A parser of all listed options. It accepts the same words as the parser of training."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, conflict_handler="resolve")
    parser.register("action", "pair", argparse.BooleanOptionalAction)
    parser.add_argument(CPU, action="store_true")
    for options, how in _records():
        kind = {"type": _TYPES[how["type"]]} if "type" in how else {}
        parser.add_argument(*options, **how | kind | {"default": argparse.SUPPRESS})
    return parser


@cache
def _records() -> list[tuple[list[str], dict[str, Any]]]:
    return [json.loads(line) for file in _FILES for line in file.read_text().splitlines()]


@cache
def _defaults() -> dict[str, Any]:
    """Megatron's default of every option that has one, by name."""
    return {name_of(option): how.get("default") for options, how in _records() for option in options}


def out_of_range(name: str, value: Any) -> str | None:
    """What is wrong with a number as a size, or because it is not finite; None if nothing is."""
    if name not in RANGES or value is None:
        return f"{value} is not a finite number" if isinstance(value, float) and not math.isfinite(value) else None
    least, largest = RANGES[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
        return f"{value!r} is not a whole number from {least} to {largest}"
    return None


class Arguments:
    """The description of a job: its arguments, by Megatron's names. They never change; `|` makes another description.

    An argument that is not among `known` has the default of Megatron's parser.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        vars(self).update(known)

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> Arguments:
        """The description of a job that gives these arguments; None leaves an argument at its default."""
        return cls({name: value for name, value in arguments.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _defaults().get(name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(name)

    def __or__(self, changes: Mapping[str, Any]) -> Arguments:
        return Arguments({**vars(self), **changes})


@cache
def known_options() -> dict[str, argparse.Action]:
    """All known options by name, with underscores."""
    return {name_of(option): action for option, action in listed_parser()._option_string_actions.items()}


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name most likely meant by `name`. All names have underscores in place of hyphens."""
    return SHORT_NAMES.get(name) or difflib.get_close_matches(name, known, 1, 0)[0]


def files_and_flags(words: Sequence[str] | None, overlays: Sequence[Path] | None) -> tuple[list[Path], list[str]]:
    """Split a command's words into files and flags, and append the overlays to the files.

    The configuration is the first word or, after known flags, the only word that no flag takes as a value.
    """
    files, flags = list(overlays or ()), list(words or ())
    first = flags[:1] if flags and not flags[0].startswith("-") else listed_parser().parse_known_args(flags)[1]
    if len(first) == 1 and not first[0].startswith("-"):
        flags.remove(first[0])
        files.insert(0, Path(first[0]))
    return files, flags
