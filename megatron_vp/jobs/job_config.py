"""Reads a job's arguments from its configuration files and its flags, which override the files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import CPU, flags_in, name_of, option_of
from megatron_vp.jobs.config_words import arguments_from_leaves
from megatron_vp.jobs.known_options import listed_parser, out_of_range, refuse_wrong_words
from megatron_vp.jobs.yaml_files import Leaf, read_leaves

ALGORITHM_ALONE = (
    "--vocab-parallel-algorithm {vocab_parallel_algorithm} has no effect without --vocab-parallel: add "
    "--vocab-parallel, or leave --vocab-parallel-algorithm out"
)
"""The error that every command reports if an algorithm is given without vocabulary parallelism."""

CPU_NAME = name_of(CPU)
"""The argument name of `--cpu`, a flag that is removed before the training script parses its arguments."""


@dataclass(frozen=True)
class JobConfig:
    """A job's arguments by long name, with underscores; a switch that is on has the value True."""

    values: dict[str, Any]
    """Values as YAML would read them: text that looks like a number is a number, and several values are a list."""
    origins: dict[str, Leaf | str]
    """Where each value was set, for messages: a `key: value` pair of a file, or a flag of the command line."""

    def of_files(self) -> dict[str, Any]:
        """Options that the files set to a value other than null and that no flag overrides."""
        return {
            name: value
            for name, value in self.values.items()
            if isinstance(self.origins[name], Leaf) and value is not None
        }

    def whole_number(self, name: str, default: int) -> int:
        """The value of an integer argument. Raises UserError if it is not an integer."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{self.origins[name]} {value} is not an integer")
        return value

    def parallel_sizes(self) -> list[int]:
        """The pipeline, tensor and context parallel size, whose product is the number of ranks in a replica."""
        names = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
        return [self.whole_number(name, 1) for name in names]


def read_job_config(files: Sequence[str | os.PathLike[str]], flags: Sequence[str]) -> JobConfig:
    """Read configuration files, then flags (`--name value`, `--name=value`, `--switch`). Later values override earlier
    ones.

    Raises UserError for a file that cannot be read, a key that is in two sections, and a word that is not a flag.
    """
    return _job_config(read_leaves(files), flags)


def _job_config(leaves: Sequence[Leaf], flags: Sequence[str]) -> JobConfig:
    values: dict[str, Any] = {}
    origins: dict[str, Leaf | str] = {}
    for leaf in leaves:
        before = origins.get(leaf.key)
        if isinstance(before, Leaf):
            raise UserError(f"{leaf} was already set in {before.section}; delete one of the two settings")
        values[leaf.key], origins[leaf.key] = leaf.value, leaf
    for option, texts in flags_in(flags):
        name = name_of(option)
        found = [_value(text) for text in texts]
        values[name], origins[name] = (True if not found else found[0] if len(found) == 1 else found), option_of(name)
    return JobConfig(values, origins)


def read_sizes(
    files: Sequence[str | os.PathLike[str]], flags: Sequence[str], commands_own: Sequence[str] = ()
) -> JobConfig:
    """Read a job as `read_job_config` does, and check its options as training does.

    `commands_own` lists the options of the calling command, which are also suggested for a misspelled option. Also
    raises UserError for an unknown argument, a value that its option does not accept, NaN or infinity.
    """
    leaves = read_leaves(files)
    config = _job_config(leaves, flags)
    arguments_from_leaves(leaves, listed_parser())
    refuse_wrong_words([word for word in flags if word != CPU], commands_own)
    for name, value in config.values.items():
        if fault := out_of_range(name, value):
            raise UserError(f"{config.origins[name]} {fault}")
    return config


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
