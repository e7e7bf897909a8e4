"""Formats settings for a user to add to a job, as flags or as a file.

Settings map the long names of arguments, with underscores, to their values. None or False unsets an argument.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

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
    lines = [f"  {name}: {_yaml_text(value)}\n" for name, value in settings.items()]
    return "parallelism:\n" + "".join(lines) if lines else ""


def _yaml_text(value: Any) -> str:
    """Format a value for YAML; quote a string whose first character has a special meaning in YAML."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return json.dumps(value) if isinstance(value, str) and value[:1] in ("*", "-", "|", "+") else str(value)
