"""Reads the arguments that decide which patches a job needs, before Megatron's parser exists.

Megatron's parser is itself patched, and no patch is applied before all patches of a run have been checked. Malformed
arguments are left for Megatron's parser to report.
"""

from __future__ import annotations

import os

from megatron_vp.jobs.command_line import split_config
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.jobs.known_options import Arguments


def early_arguments(words: list[str]) -> Arguments:
    """Read a command line: its arguments are switches or texts. Raises UserError for a configuration file that cannot
    be read.
    """
    files, flags = split_config(words)
    first = next((place for place, word in enumerate(flags) if word.startswith("--")), len(flags))
    given = read_job_config(files, flags[first:]).values.items()
    texts = {name: each if each is None or isinstance(each, bool) else str(each) for name, each in given}
    ranks = {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    return Arguments.given(texts | ranks)
