"""Settings (arguments by long name, None and False to unset one) as what a user adds to a job: flags, or a file."""

from __future__ import annotations

import shlex
from typing import Any

from megatron_vp.jobs.command_line import option_of


def flags_of(settings: dict[str, Any]) -> str:
    """Settings as flags of a command line; what is to be unset has none."""
    words = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words += [option_of(name)] if value is True else [option_of(name), shlex.quote(str(value))]
    return " ".join(words)


def yaml_of(settings: dict[str, Any]) -> str:
    """Settings as an overlay file."""
    words = {None: "null", True: "true", False: "false"}
    lines = [f"  {name}: {words.get(value, value)}\n" for name, value in settings.items()]
    return "parallelism:\n" + "".join(lines) if lines else ""
