"""Formats settings for a user to add to a job, as flags or as a file.

Settings map the long names of arguments, with underscores, to their values. None or False unsets an argument.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from megatron_vp.jobs.command_line import option_of

ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron requires this variable to be 1 with tensor or context parallelism on GPUs before Blackwell."""


def flags_of(settings: dict[str, Any]) -> str:
    """Format settings as command-line flags, leaving out those that unset an option."""
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
