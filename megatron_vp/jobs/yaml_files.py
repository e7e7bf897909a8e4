"""Reads YAML configuration files, in which every leaf sets an argument; later files override earlier ones.

Section names and nesting only help human readers. A leaf's key is a long option without its leading dashes and with
underscores (`--no-rope-fusion` is `no_rope_fusion: true`).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_SECTIONS = re.compile(r"\$\{[\w.]*\.(?=\w+\})")
_SECRET = re.compile(
    r"(?!.*_(FILE|PATH|DIR)$).*"
    r"((KEYS?|TOKEN|PASS|PASSPHRASE|CREDENTIALS?|CREDS?|COOKIE|JWT)\d*$|(^|_)(AUTH|BEARER|PAT)\d*$|.._PWD$|SECRET|PASSW)",
    re.IGNORECASE,
)


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
    found: list[Leaf] = []
    for file, content in (layer for path in paths for layer in _layers(configuration(Path(path)), ())):
        own = [Leaf(file, *each) for each in _leaves(content)]
        keys = {leaf.key for leaf in own}
        found = [leaf for leaf in found if leaf.key not in keys] + own
    values = {leaf.key: leaf.value for leaf in found}
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        # Only the first line of OmegaConf's message is meant for users.
        where = f" (at '{error.full_key}')" if error.full_key else ""
        raise UserError(f"{', '.join(map(str, paths))}: {str(error).partition('\n')[0]}{where}") from error
    return [replace(leaf, value=resolved[leaf.key]) for leaf in found]


def _layers(path: Path, overlaid_by: tuple[Path, ...]) -> list[tuple[Path, Any]]:
    """The files that `path` is based on (`base:`), then `path` itself, as pairs of path and parsed content."""
    if path.resolve() in overlaid_by:
        raise UserError(f"{path}: '{_BASE}' leads back to the file itself; remove one of the '{_BASE}' lines")
    # Every key has one value, so the sections in an interpolation are for human readers alone.
    text = _SECTIONS.sub("${", read_text(path, "configuration file", MIB))
    lines = "write 'argument_name: value' lines, grouped in sections, and put texts with special characters in quotes"
    try:
        config = OmegaConf.load(io.StringIO(text))
    # OmegaConf raises OSError for a file that contains only a word, and YAML ValueError for impossible dates.
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError, ValueError) as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error)}; {lines}") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} does not contain a mapping; {lines}")
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


def _leaves(node: Mapping[Any, Any], trail: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    """The section, the key and the value of each leaf."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*trail, str(key)))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            where = ".".join((*trail, str(key)))
            raise UserError(f"section '{where}' is a list: write its 'argument_name: value' lines without dashes")
        else:
            yield f"section '{'.'.join(trail)}'" if trail else "the top level", str(key), value


def one_line(error: Exception) -> str:
    """The text of `error` with line breaks replaced by spaces."""
    return " ".join(str(error).split())
