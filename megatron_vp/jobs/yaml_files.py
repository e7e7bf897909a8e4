"""Reads YAML configuration files, in which every leaf sets an argument; later files override earlier ones.

Section names and nesting only help human readers. A leaf's key is a long option without its leading dashes and with
underscores (`--no-rope-fusion` is `no_rope_fusion: true`).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.jobs.shipped import FOLDER, configuration, names

_BASE = "base"
_VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*(\w+)")
# Most of these words match only at the end of a name, and PWD only after a prefix such as DB_. TOKENIZER, TRAIN_TOKENS,
# KEY_FILE and PWD therefore do not count as secrets.
_SECRET = re.compile(
    r"(?!.*_(FILE|PATH|DIR)$).*"
    r"((KEYS?|TOKEN|PASS|PASSPHRASE|CREDENTIALS?|CREDS?|COOKIE|JWT)\d*$|(^|_)(AUTH|BEARER|PAT)\d*$|.._PWD$|SECRET|PASSW)",
    re.IGNORECASE,
)

_Trail = tuple[str, ...]
"""The names of the sections that contain a key, and the key."""


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
    """All leaves of YAML files; later files overlay earlier ones, in whatever section they have a key.

    OmegaConf resolves interpolations (`${section.key}`, `${oc.env:NAME}`) after all files are overlaid. If a file has
    `base: other.yaml` at its top level, other.yaml is read first. Its path is relative to the file that names it. The
    base and each of `paths` may also be the name of a configuration that comes with megatron_vp. Raises UserError for
    a missing or malformed file.
    """
    found: list[tuple[Path, _Trail, Any]] = []
    files: dict[_Trail, Path] = {}
    for file, content in (layer for path in paths for layer in _layers(configuration(Path(path)), ())):
        own = list(_leaves(content))
        keys = {trail[-1] for trail, _ in own}
        found = [each for each in found if each[1][-1] not in keys] + [(file, trail, value) for trail, value in own]
        files |= {trail: file for trail, _ in own}
    values = {trail[-1]: value for _, trail, value in found}
    placed = {trail: value for _, trail, value in found}
    tree: dict[str, Any] = {}
    for trail, file in files.items():  # An interpolation may name a key in the section of any file.
        within = tree
        for number, name in enumerate(trail[:-1], 1):
            if (other := files.get(trail[:number])) is not None and values[name] is not None:
                raise UserError(
                    f"{other}: '{'.'.join(trail[:number])}' has a value here, but is a section in {file}: replace "
                    f"this value with 'argument_name: value' lines"
                )
            if within.get(name) is None:
                within[name] = {}
            within = within[name]
        if not isinstance(within.get(trail[-1]), dict):
            within[trail[-1]] = placed.get(trail, values[trail[-1]])
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        # Only the first line of OmegaConf's message is meant for users. The lines after it describe internal state
        # (full_key, object_type).
        what = str(error).partition("\n")[0]
        where = f" (at '{error.full_key}')" if error.full_key else ""
        raise UserError(f"{', '.join(map(str, paths))}: {what}{where}") from error
    leaves = []
    for file, trail, _ in found:
        value = reduce(getitem, trail, resolved)
        if not isinstance(value, Mapping):  # Otherwise, an empty section of this file has keys in another.
            section = f"section '{'.'.join(trail[:-1])}'" if trail[1:] else "the top level"
            leaves.append(Leaf(file, section, trail[-1], value))
    return leaves


def _layers(path: Path, overlaid_by: tuple[Path, ...]) -> list[tuple[Path, Any]]:
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
    content: Any = OmegaConf.to_container(config)
    for name in _VARIABLE.findall(str(content)):
        if _SECRET.match(name):
            raise UserError(
                f"{path}: ${{oc.env:{name}}} looks like a secret, and arguments are written to files and logs: leave "
                f"it out; programs that need {name} can read it from the environment"
            )
    base = content.pop(_BASE, None)
    if base is None:
        return [(path, content)]
    if base in names():
        below = FOLDER / f"{base}.yaml"
    elif isinstance(base, str) and base.endswith((".yaml", ".yml")):
        below = path.parent / base
    else:
        raise UserError(
            f"{path}: '{_BASE}' must be a .yaml or .yml file, or a configuration that comes with megatron_vp, not "
            f"{base!r}"
        )
    return [*_layers(below, (*overlaid_by, path.resolve())), (path, content)]


def _leaves(node: Mapping[Any, Any], trail: _Trail = ()) -> Iterator[tuple[_Trail, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*trail, str(key)))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            where = ".".join((*trail, str(key)))
            raise UserError(f"section '{where}' is a list: write its 'argument_name: value' lines without dashes")
        else:
            yield (*trail, str(key)), value


def one_line(error: Exception) -> str:
    """The text of `error` with line breaks replaced by spaces."""
    return " ".join(str(error).split())
