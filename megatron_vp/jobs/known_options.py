"""Looks up the options that a training script accepts, for commands that read a job without loading Megatron.

The list is in `known_options.txt` in this folder; `known_options_SERIES.txt` has the options that a later series of
Megatron releases adds. `scripts/known_options.py` writes these files, and a test compares them with the parser of the
installed Megatron. If the installed Megatron is older than the list, commands accept options that training refuses.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import name_of, option_of
from megatron_vp.jobs.yaml_files import Leaf

_FILES = sorted(Path(__file__).parent.glob("known_options*.txt"), key=lambda path: path.stem)

_SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "layers": "num_layers",
    "batch_size": "micro_batch_size",
    "schedule": "pipeline_schedule",
    "vocab": "vocab_size",
}
"""Common short names and their options. A search for similar spellings would not find these options."""

_KINDS = {"int": (int,), "float": (int, float)}
_EXPECTED = {"int": "an integer", "float": "a number", "text": "a string", "bool": "true or false"}


@dataclass(frozen=True)
class Option:
    """Which values an option accepts."""

    kind: str
    """One of `switch`, `int`, `float`, `bool` and `text`."""
    several: bool
    choices: tuple[str, ...]
    """The accepted values; empty if the option accepts any value of its kind."""


@cache
def known_options() -> dict[str, Option]:
    """All known options by name, with underscores."""
    found = {}
    for line in (line for file in _FILES for line in file.read_text().splitlines()):
        if not line.startswith("#"):
            option, kind, *choices = line.split()
            found[name_of(option)] = Option(kind.rstrip("+"), kind.endswith("+"), tuple(",".join(choices).split(",")))
    return {name: Option(each.kind, each.several, tuple(filter(None, each.choices))) for name, each in found.items()}


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name most likely meant by `name`. All names have underscores in place of hyphens."""
    return _SHORT.get(name) or difflib.get_close_matches(name, known, 1, 0)[0]


def refuse_unknown(name: str, origin: Leaf | str, commands_own: Iterable[str] = ()) -> None:
    """Raise UserError for an unknown training option, and suggest the most similar known option.

    `commands_own` lists the calling command's own options, which may be suggested too.
    """
    known = known_options()
    if name in known:
        return
    nearest = nearest_name(name, [*commands_own, *known])
    if isinstance(origin, Leaf):
        hint = f"the nearest known argument is '{nearest}'"
        if origin.section == "the top level" and not isinstance(origin.value, str | int | float):
            hint = "a section must contain 'argument_name: value' lines"
        raise UserError(f"{origin} is not a known argument; {hint}")
    raise UserError(f"{origin} is not a known option; the nearest known option is {option_of(nearest)}")


def refuse_wrong_value(name: str, value: Any, origin: Leaf | str) -> None:
    """Raise UserError if a known option does not accept `value`; None stands for the default and is always accepted."""
    option = known_options()[name]
    if value is None:
        return
    if option.kind == "switch":
        if isinstance(value, bool):
            return
        if isinstance(origin, Leaf):
            raise UserError(f"{origin} is a switch: write true or false, not {value!r}")
        raise UserError(f"{origin} is a switch and takes no value; it was given {value!r}")
    if value is True and not isinstance(origin, Leaf):
        if option.several:
            return  # Only Megatron's parser knows whether the option accepts an empty list.
        raise UserError(f"{origin} needs a value: {_expected(option)}")
    if isinstance(value, list) and not option.several:
        raise UserError(f"{origin} takes one value; it was given {len(value)}: {', '.join(map(str, value))}")
    for each in value if isinstance(value, list) else [value]:
        if not _fits(option, each):
            raise UserError(f"{origin} must be {_expected(option)}, not {each!r}")


def _fits(option: Option, value: Any) -> bool:
    if isinstance(value, bool):
        return option.kind == "bool"
    if isinstance(value, str) and value.startswith("-") and value != "-":
        return False  # A string with a leading dash is probably a misspelled option.
    if option.kind in _KINDS and not isinstance(value, _KINDS[option.kind]):
        return False
    return isinstance(value, str | int | float) and (not option.choices or str(value) in option.choices)


def _expected(option: Option) -> str:
    return f"one of {', '.join(option.choices)}" if option.choices else _EXPECTED[option.kind]
