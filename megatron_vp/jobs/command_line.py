"""Finds the configuration files and flags among the words of a command line, before any parser runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_vp.errors import UserError

CONFIG = "--config"
CPU = "--cpu"


def flags_in(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The flags in order: each name with its dashes, and the words that follow it up to the next word that starts with
    `--`. `--name=value` counts as `--name value`.

    Raises UserError if the first word is not a flag.
    """
    found: list[tuple[str, list[str]]] = []
    for word in words:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            found.append((option, [value] if equals else []))
        elif not found:
            raise UserError(f"{word!r} is not a flag; after the configuration file, give only --flags")
        else:
            found[-1][1].append(word)
    return found


def flag_value(words: Sequence[str], option: str) -> str | None:
    """The first value of the last occurrence of `option` ("" for a bare flag); None if it does not occur."""
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    values = dict(flags_in(words[first:])).get(option)
    return None if values is None else "".join(values[:1])


def asks_for_cpu(words: Sequence[str]) -> bool:
    """Whether `--cpu` or MEGATRON_VP_CPU=1 forbids the use of CUDA devices."""
    return CPU in words or os.environ.get("MEGATRON_VP_CPU") == "1"


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the command line contains `-h` or `--help`."""
    return bool({"-h", "--help"} & set(words))


def split_config(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the files given with `--config` from all other words, without changing the order.

    Raises UserError for a `--config` without a file.
    """
    files: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option != CONFIG:
            others.append(word)
            continue
        if not equals:
            value = next(rest, "-")
            if value.startswith("-"):
                hint = "if the file's name starts with a dash, give it as ./-NAME"
                raise UserError(f"argument {CONFIG}: expected one argument; {hint}")
        files.append(value)
    return files, others


def arguments(files: Sequence[Path], flags: Sequence[str]) -> list[str]:
    """The job's files and flags as arguments of a training script."""
    return [*(word for file in files for word in (CONFIG, spelled(file))), *flags]


def spelled(file: Path) -> str:
    """The file's path, prefixed with `./` if it starts with a dash, so that it is not taken for an option."""
    return f"./{file}" if str(file).startswith("-") else str(file)


def option_of(name: str) -> str:
    """The long option of an argument, such as `--num-layers` for `num_layers`."""
    return f"--{name.replace('_', '-')}"


def name_of(option: str) -> str:
    """The name of a long option's argument, such as `num_layers` for `--num-layers`."""
    return option.lstrip("-").replace("-", "_")
