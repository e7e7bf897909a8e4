"""Translates configuration files into arguments for a command-line parser, such as Megatron's.

The arguments go *before* the flags of the command line: argparse keeps the last value, so the command line overrides
the files. A switch that a file turned on can be turned off by a later file, but not by the command line, because most
of Megatron's switches have no flag that turns them off.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import nearest_name
from megatron_vp.jobs.yaml_files import Leaf, read_leaves


def arguments_from_config(paths: Sequence[str | os.PathLike[str]], parser: argparse.ArgumentParser) -> list[str]:
    """Translate YAML files into arguments for `parser`; later files overlay earlier ones.

    `null` leaves an option at its default, and `false` turns a switch off. A list gives an option several values.

    Raises UserError for a missing or malformed file, an unknown key, a key given twice, or a value of the wrong type.
    """
    return arguments_from_leaves(read_leaves(paths), parser)


def arguments_from_leaves(leaves: Iterable[Leaf], parser: argparse.ArgumentParser) -> list[str]:
    """Translate `key: value` pairs of configuration files into arguments for `parser`. Raises UserError."""
    options = {
        option.lstrip("-").replace("-", "_"): action for action in parser._actions for option in action.option_strings
    }
    seen: dict[argparse.Action, str] = {}
    arguments: list[str] = []
    for leaf in leaves:
        action = options.get(leaf.key)
        if action is None or isinstance(action, argparse._HelpAction):
            hint = f"the nearest known argument is '{nearest_name(leaf.key, options)}'"
            if leaf.section == "the top level" and not isinstance(leaf.value, str | int | float):
                hint = "a section must contain 'argument_name: value' lines"
            raise UserError(f"{leaf} is not a known argument; {hint}")
        if action in seen:
            raise UserError(f"{leaf} is also set in {seen[action]}; delete one of the two settings")
        seen[action] = leaf.section
        if leaf.value is not None:
            arguments += _argument(parser, action, leaf.key, leaf.value, str(leaf))
    return arguments


def _argument(parser: argparse.ArgumentParser, action: argparse.Action, key: str, value: Any, where: str) -> list[str]:
    option = next(o for o in action.option_strings if o.lstrip("-").replace("-", "_") == key)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{where} is a switch: write true or false, not {value!r}")
        if value:
            return [option]
        if isinstance(action, argparse.BooleanOptionalAction):
            return [next(o for o in action.option_strings if o.startswith("--no-") != option.startswith("--no-"))]
        return []
    several, values = action.nargs is not None, value if isinstance(value, list) else [value]
    counts: dict[Any, int] = {None: 1, "*": len(values), "+": max(1, len(values))}
    wanted = counts.get(action.nargs, action.nargs)
    if len(values) != wanted:
        raise UserError(f"{where}: the number of values must be {wanted}, not {len(values)}")
    texts = [_text(parser, action, item, where) for item in values]
    return [option, *texts] if several else [f"{option}={texts[0]}"]


def _text(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> str:
    """The command-line text for `value`. Raises UserError if the option's type or choices do not accept it."""
    if isinstance(value, bool) and action.type is bool:
        return "True" if value else ""  # bool("False") is true
    if isinstance(value, bool | list | Mapping) or value is None:
        raise UserError(f"{where} cannot be {value!r}; strings such as 'true' need quotes")
    try:
        parser._check_value(action, parser._get_value(action, str(value)))
    except argparse.ArgumentError as error:
        raise UserError(f"{where}: {error.message}") from error
    return str(value)
