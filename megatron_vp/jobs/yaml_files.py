"""Reads YAML configuration files, in which every leaf sets an argument; later files override earlier ones.

Section names and nesting only help human readers. A leaf's key is a long option without its leading dashes and with
underscores (`--no-rope-fusion` is `no_rope_fusion: true`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.jobs.secret_variables import environment_without_secrets
from megatron_vp.jobs.shipped import configuration

_BASE = "base"


@dataclass(frozen=True)
class Leaf:
    """A `key: value` pair from overlaid files, with its `section` and the last `file` that sets the key."""

    file: Path
    section: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.file}: '{self.key}' in {self.section}"


def read_leaves(paths: Sequence[str | os.PathLike[str]]) -> list[Leaf]:
    """All leaves of YAML files; later files overlay earlier ones.

    OmegaConf resolves interpolations (`${section.key}`, `${oc.env:NAME}`) after all files are overlaid. If a file has
    `base: other.yaml` at its top level, other.yaml is read first. Its path is relative to the file that names it. Each
    of `paths` may also be the name of a configuration that comes with megatron_vp. Raises UserError for a missing or
    malformed file.
    """
    if not paths:
        return []
    layers = [layer for path in paths for layer in _layers(configuration(Path(path)), ())]
    _refuse_mixed_sections(layers)
    try:
        with environment_without_secrets() as refused:
            merged = OmegaConf.to_container(OmegaConf.merge(*(config for _, config in layers)), resolve=True)
    except OmegaConfBaseException as error:
        # Only the first line of OmegaConf's message is meant for users. The lines after it describe internal state
        # (full_key, object_type).
        what = refused[0] if refused else str(error).partition("\n")[0]
        where = f" (at '{error.full_key}')" if error.full_key else ""
        raise UserError(f"{', '.join(map(str, paths))}: {what}{where}") from error
    raw = [(file, OmegaConf.to_container(config)) for file, config in reversed(layers)]
    assert isinstance(merged, Mapping)  # `_layers` refuses files that are not mappings.
    return [
        Leaf(
            file=next(file for file, tree in raw if _holds(tree, trail)),
            section=f"section '{'.'.join(trail[:-1])}'" if trail[1:] else "the top level",
            key=trail[-1],
            value=value,
        )
        for trail, value in _leaves(merged)
    ]


def _refuse_mixed_sections(layers: Sequence[tuple[Path, DictConfig]]) -> None:
    """Raise UserError if a name is a section in one file, but a value or a list in another."""
    found: dict[tuple[str, ...], tuple[bool, Path]] = {}
    for file, config in layers:
        for trail, value in _nodes(OmegaConf.to_container(config)):
            if value is None and trail not in found:
                continue
            before, other = found.setdefault(trail, (isinstance(value, Mapping), file))
            if before != isinstance(value, Mapping):
                section, leaf = (other, file) if before else (file, other)
                raise UserError(
                    f"{leaf}: '{'.'.join(trail)}' has a value here, but is a section in {section}: replace "
                    f"this value with 'argument_name: value' lines"
                )


def _nodes(tree: Any, trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every name in a nested mapping, including section names, with its value."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield (*trail, str(key)), value
            yield from _nodes(value, (*trail, str(key)))


def _layers(path: Path, overlaid_by: tuple[Path, ...]) -> list[tuple[Path, DictConfig]]:
    """The files that `path` is based on (`base:`), then `path` itself, as pairs of path and parsed content."""
    if path.resolve() in overlaid_by:
        raise UserError(f"{path}: '{_BASE}' leads back to the file itself; remove one of the '{_BASE}' lines")
    text = read_text(path, "configuration file", MIB)
    try:
        config = OmegaConf.load(io.StringIO(text))
    except OSError as error:  # OmegaConf raises OSError for a file that contains only a word or a number.
        raise UserError(
            f"{path} does not contain a mapping; write 'argument_name: value' lines, grouped in sections"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{path} nests sections or lists too deeply; write them on one level") from error
    except OmegaConfBaseException as error:
        raise UserError(
            f"{path}: {str(error).partition('\n')[0]}; keys must be section names or argument names"
        ) from error
    except ValueError as error:  # YAML raises ValueError for impossible dates and numbers with thousands of digits.
        what = one_line(error).partition(";")[0]
        raise UserError(f"{path} is not valid YAML: {what}; quote the value if it is text") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} does not contain a mapping; write 'argument_name: value' lines, grouped in sections")
    base = config.pop(_BASE, None)
    if base is None:
        return [(path, config)]
    if not isinstance(base, str):
        raise UserError(f"{path}: '{_BASE}' must be the path of one YAML file, not {base!r}")
    if not base.endswith((".yaml", ".yml")):
        raise UserError(f"{path}: '{_BASE}' must name a .yaml or .yml file, not {base!r}")
    return [*_layers(path.parent / base, (*overlaid_by, path.resolve())), (path, config)]


def _leaves(node: Mapping[Any, Any], trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
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


def one_line(error: Exception) -> str:
    """The text of `error` with line breaks replaced by spaces."""
    return " ".join(str(error).split())
