"""Reads a job's arguments from its configuration files and flags, which override the files, and writes settings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import flags_in, name_of, option_of
from megatron_vp.jobs.config_words import arguments_from_config
from megatron_vp.jobs.known_options import listed_parser, out_of_range
from megatron_vp.jobs.yaml_files import read_leaves

ALGORITHM_ALONE = (
    "--vocab-parallel-algorithm {vocab_parallel_algorithm} has no effect without --vocab-parallel: add "
    "--vocab-parallel, or leave --vocab-parallel-algorithm out"
)
"""The error that every command reports if an algorithm is given without vocabulary parallelism."""

JobConfig = dict[str, Any]
"""A job's arguments by long name, with underscores; a switch that is on has the value True."""


def read_job_config(files: Sequence[str | os.PathLike[str]], flags: Sequence[str]) -> JobConfig:
    """Read configuration files, then flags (`--name value`, `--name=value`, `--switch`), without checking options or
    values, so that a script may have options of its own. Later values override earlier ones.

    Values are as YAML would read them: text that looks like a number is a number, and several values are a list. Raises
    UserError for a file that cannot be read, and for a word that is not a flag.
    """
    values = {leaf.key: leaf.value for leaf in read_leaves(files)}
    for option, texts in flags_in(flags):
        found = [_value(text) for text in texts]
        values[name_of(option)] = True if not found else found[0] if len(found) == 1 else found
    return values


def read_sizes(
    files: Sequence[str | os.PathLike[str]], flags: Sequence[str], commands_own: Sequence[str] = ()
) -> JobConfig:
    """Read a job's arguments as training does. Arguments that are not given, or null, are missing.

    `commands_own` lists the options of the calling command, which are also suggested for a misspelled option. Raises
    UserError for an unknown argument, a value that its option does not accept, NaN or infinity.
    """
    parser = listed_parser()
    parser.commands_own = commands_own
    values = vars(parser.parse_args([*arguments_from_config(files, parser), *flags]))
    for name, value in values.items():
        if fault := out_of_range(name, value):
            raise UserError(f"{option_of(name)} {fault}")
    return values


def whole_number(job: JobConfig, name: str, default: int) -> int:
    """The value of an integer argument. Raises UserError if it is not an integer."""
    value = job.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{option_of(name)} {value} is not an integer")
    return value


def parallel_sizes(job: JobConfig) -> list[int]:
    """The pipeline, tensor and context parallel size, whose product is the number of ranks in a replica."""
    names = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    return [whole_number(job, name, 1) for name in names]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


TWO_BATCHES = (
    "--step-batch-size-schedule and --global-batch-size exclude each other: leave one out; if a configuration file "
    "sets the batch size, add `global_batch_size: null` in a file given with --config"
)


def last_batch(schedule: str) -> int:
    """The batch size at the end of `--step-batch-size-schedule`: pairs THRESHOLD:BATCH, such as `0:256 1B:512`.

    Raises UserError for another text.
    """

    def number(text: str) -> int:
        digits = text.upper().rstrip("KMBT")
        return int(float(digits) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[text.upper()[len(digits) :]])

    try:
        pairs = [pair.split(":") for pair in str(schedule).replace(",", " ").split()]
        if (last := max((number(threshold), number(batch)) for threshold, batch in pairs)[1]) < 1:
            raise ValueError("no samples")
        return last
    except (KeyError, OverflowError, ValueError) as error:
        raise UserError(
            f"--step-batch-size-schedule {schedule!r} cannot be parsed: give THRESHOLD:BATCH pairs, as in "
            "'0:256 1B:512'"
        ) from error


ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron requires this variable to be 1 with tensor or context parallelism on GPUs before Blackwell."""


def flags_of(settings: dict[str, Any]) -> str:
    """Format settings (values by long name; None and False unset one) as flags, without those that unset an option."""
    words = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        text = shlex.quote(str(value))
        if value is True:
            words.append(option_of(name))
        elif str(value).startswith("-"):  # Without "=", argparse would mistake the value for an option.
            words.append(f"{option_of(name)}={text}")
        else:
            words += [option_of(name), text]
    return " ".join(words)


def yaml_of(settings: dict[str, Any]) -> str:
    """Format settings as a YAML file that overrides a configuration."""
    return yaml.safe_dump({"parallelism": settings}, sort_keys=False, width=10_000) if settings else ""
