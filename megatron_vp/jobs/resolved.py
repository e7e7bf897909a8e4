"""Writes a run's resolved configuration: a file with every argument, next to the checkpoints or logs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_vp.errors import UserError
from megatron_vp.files import replacing

RESOLVED_NAME = "resolved_config.yaml"


def write_resolved(args: argparse.Namespace, path: str | os.PathLike[str]) -> None:
    """Write every argument of `args` as plain YAML, sorted by name; the file is written completely or not at all.

    Values that YAML cannot represent (enums, data types, functions) are written as text. Only the file's owner and
    group can read it. Only one rank may call this function. Raises UserError if the file cannot be written.
    """
    path = Path(path)
    found = plain({name: value for name, value in vars(args).items() if not name.startswith("_")})
    text = yaml.safe_dump(found, sort_keys=True, default_flow_style=None, width=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, most_mode=0o640) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; use a writable directory with free space") from error


def plain(value: Any) -> Any:
    """A value in the types of YAML. It is the same in every process: no memory addresses, sets and mappings sorted."""
    if isinstance(value, Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in sorted(value.items(), key=str)}
    if isinstance(value, partial):
        return plain([value.func, value.args, value.keywords])
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    text = str(value)
    return {type(value).__qualname__: plain(vars(value))} if " at 0x" in text else text
