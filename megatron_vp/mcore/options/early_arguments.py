"""Reads the arguments that decide which patches a job needs, before Megatron's parser exists.

Megatron's parser is itself patched, and no patch is applied before all patches of a run have been checked. Malformed
arguments are left for Megatron's parser to report.
"""

from __future__ import annotations

import argparse
import os

from megatron_vp.jobs.command_line import split_config
from megatron_vp.jobs.job_config import read_job_config


class EarlyArguments(argparse.Namespace):
    """The given arguments under Megatron's names, as switches or texts. Any other argument is None."""

    def __getattr__(self, name: str) -> None:
        return None


def early_arguments(words: list[str]) -> EarlyArguments:
    """Read the arguments of a command line. Raises UserError for a configuration file that cannot be read."""
    files, flags = split_config(words)
    first = next((place for place, word in enumerate(flags) if word.startswith("--")), len(flags))
    args = EarlyArguments()
    for name, value in read_job_config(files, flags[first:]).values.items():
        setattr(args, name, value if value is None or isinstance(value, bool) else str(value))
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return args
