"""Configuration files: YAML whose leaves are long argument names becomes an argument vector, and back.

The file is grouped in sections for its reader; the names and the nesting of sections mean nothing. A leaf's key is an
option of the parser without its leading dashes and with underscores (`--no-rope-fusion` is `no_rope_fusion: true`).
Several files are overlaid, the later one wins: a model, and a method on top of it. The vector goes *before* the command
line's own flags: argparse keeps the last value, so the command line wins. A switch that a file turned on stays on,
because most of Megatron's switches have no opposite; a later file can turn it off.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text, replacing
from megatron_vp.mcore.options.secrets import environment_without_secrets

_BASE = "base"


def arguments_from_config(paths: Sequence[str | os.PathLike[str]], parser: argparse.ArgumentParser) -> list[str]:
    """Translate YAML files, each overlaying those before it, into arguments for `parser`, in the order of the files.

    `null` leaves an option at its default, and so does `false` for a switch. Lists serve options that take several
    values.

    Raises UserError for a missing or malformed file, an unknown key, a key given twice, or a value of the wrong type.
    """
    options = {
        option.lstrip("-").replace("-", "_"): action for action in parser._actions for option in action.option_strings
    }
    seen: dict[argparse.Action, str] = {}
    arguments: list[str] = []
    for leaf in read_leaves(paths):
        action = options.get(leaf.key)
        if action is None or isinstance(action, argparse._HelpAction):
            nearest = difflib.get_close_matches(leaf.key, options, n=1, cutoff=0.0)
            raise UserError(f"{leaf} is no known argument; the nearest known one is '{nearest[0]}'")
        if action in seen:
            raise UserError(f"{leaf} was already set in {seen[action]}; keep one of them")
        seen[action] = leaf.section
        if leaf.value is not None:
            arguments += _argument(action, leaf.key, leaf.value, str(leaf))
    return arguments


@dataclass(frozen=True)
class Leaf:
    """One `key: value` of overlaid files: `section` says where in the tree, `file` is the one whose value stands."""

    file: Path
    section: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.file}: '{self.key}' in {self.section}"


def read_leaves(paths: Sequence[str | os.PathLike[str]]) -> list[Leaf]:
    """All leaves of YAML files, each overlaying those before it, in the order of the files.

    Interpolations (`${section.key}`, `${oc.env:NAME}`) are OmegaConf's and see the overlaid whole; variables that hold
    secrets are refused, because arguments are written to files and logs. A top-level `base: other.yaml` (relative to
    its file) is read before the file that names it. Raises UserError for a file that is missing or malformed.
    """
    if not paths:
        return []
    layers = [layer for path in paths for layer in _layers(Path(path), ())]
    try:
        with environment_without_secrets() as refused:
            merged = OmegaConf.to_container(OmegaConf.merge(*(config for _, config in layers)), resolve=True)
    except OmegaConfBaseException as error:
        what = (
            refused[0] if refused else str(error).partition("\n")[0]
        )  # the rest is OmegaConf's own position in its types
        where = f" (at '{error.full_key}')" if error.full_key else ""
        raise UserError(f"{', '.join(map(str, paths))}: {what}{where}") from error
    raw = [(file, OmegaConf.to_container(config)) for file, config in reversed(layers)]
    return [
        Leaf(
            file=next(file for file, tree in raw if _holds(tree, trail)),
            section=f"section '{'.'.join(trail[:-1])}'" if trail[1:] else "the top level",
            key=trail[-1],
            value=value,
        )
        for trail, value in _leaves(merged)
    ]


def write_resolved(args: argparse.Namespace, path: str | os.PathLike[str]) -> None:
    """Write every argument of `args` as plain YAML, sorted by name; the file appears complete or not at all.

    Values that YAML does not know (enums, data types, functions) are written as their text. Users outside of the file's
    group cannot read it. Call it on one rank. Raises UserError where the file cannot be written.
    """
    path = Path(path)
    plain = {name: _plain(value) for name, value in vars(args).items() if not name.startswith("_")}
    text = yaml.safe_dump(plain, sort_keys=True, default_flow_style=None, width=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, most_mode=0o640) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; make room or choose another directory") from error


def read_resolved(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of a run by their names, as `write_resolved` wrote them; UserError if they cannot be read."""
    try:
        found = yaml.safe_load(read_text(path, "resolved configuration", MIB))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read resolved configuration {path}: {_one_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no resolved configuration: it holds no mapping")
    return found


def _layers(path: Path, overlaid_by: tuple[Path, ...]) -> list[tuple[Path, DictConfig]]:
    """The file after its bases, each with its path."""
    if path.resolve() in overlaid_by:
        raise UserError(f"{path}: '{_BASE}' leads back to the file itself; remove one of the '{_BASE}' lines")
    text = read_text(path, "configuration file", MIB)
    try:
        config = OmegaConf.load(io.StringIO(text))
    except OSError as error:  # a bare word or a number
        raise UserError(f"{path} holds no mapping; write 'argument_name: value' lines, grouped in sections") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{path} nests sections or lists too deeply; write them on one level") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {str(error).partition('\n')[0]}; keys are sections and names of arguments") from error
    except ValueError as error:  # a number of thousands of digits, a date that does not exist
        what = _one_line(error).partition(";")[0]
        raise UserError(f"{path} is not valid YAML: {what}; quote it if the text is meant") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} holds no mapping; write 'argument_name: value' lines, grouped in sections")
    base = config.pop(_BASE, None)
    if base is None:
        return [(path, config)]
    if not isinstance(base, str):
        raise UserError(f"{path}: '{_BASE}' must be the path of one YAML file, not {base!r}")
    if not base.endswith((".yaml", ".yml")):
        raise UserError(f"{path}: '{_BASE}' must name a .yaml or .yml file, not {base!r}")
    return [*_layers(path.parent / base, (*overlaid_by, path.resolve())), (path, config)]


def _leaves(node: Mapping[str, Any], trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*trail, str(key)))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            where = ".".join((*trail, str(key)))
            raise UserError(f"section '{where}' is a list: write its 'argument_name: value' lines without dashes")
        else:
            yield (*trail, str(key)), value


def _holds(tree: Any, trail: tuple[str, ...]) -> bool:
    if not trail:
        return True
    return isinstance(tree, Mapping) and any(
        str(key) == trail[0] and _holds(value, trail[1:]) for key, value in tree.items()
    )


def _argument(action: argparse.Action, key: str, value: Any, where: str) -> list[str]:
    option = next(o for o in action.option_strings if o.lstrip("-").replace("-", "_") == key)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{where} is a switch: write true or false, not {value!r}")
        if value:
            return [option]
        if isinstance(action, argparse.BooleanOptionalAction):
            return [next(o for o in action.option_strings if o.startswith("--no-") != option.startswith("--no-"))]
        return []
    several = action.nargs is not None
    if isinstance(value, list) and not several:
        raise UserError(f"{where} takes one value, not the list {value!r}")
    values = value if isinstance(value, list) else [value]
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        raise UserError(f"{where} takes {action.nargs} values, not {len(values)}")
    if action.nargs == "+" and not values:
        raise UserError(f"{where} takes at least one value, not an empty list")
    texts = [_text(action, item, where) for item in values]
    return [option, *texts] if several else [f"{option}={texts[0]}"]


def _text(action: argparse.Action, value: Any, where: str) -> str:
    """The command line's spelling of `value`, after the option's own type and choices have accepted it."""
    if isinstance(value, bool) and action.type is bool:
        return "True" if value else ""  # bool("False") is true
    if isinstance(value, bool | list | Mapping) or value is None:
        raise UserError(f"{where} must be {_expected(action)}, not {value!r}; quote it if the text is meant")
    text = str(value)
    try:
        converted = action.type(text) if action.type is not None else text
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        raise UserError(f"{where} must be {_expected(action)}, not {value!r}") from error
    if action.choices is not None and converted not in action.choices:
        raise UserError(f"{where} must be {_expected(action)}, not {value!r}")
    return text


def _expected(action: argparse.Action) -> str:
    if action.choices is not None:
        return "one of " + ", ".join(str(getattr(choice, "name", choice)) for choice in action.choices)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", None: "a string"}
    return names.get(action.type, "a value that the option accepts")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return getattr(value, "__qualname__", None) or str(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
