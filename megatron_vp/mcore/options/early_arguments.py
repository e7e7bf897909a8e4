"""Reads the arguments that decide which patches a job needs, before Megatron's parser exists.

Megatron's parser is itself patched, and no patch is applied before all patches of a run have been checked. The few
arguments that select patches are therefore read first. Malformed arguments are left for Megatron's parser to report.
"""

from __future__ import annotations

import argparse
import os

from megatron_vp.jobs.command_line import split_config
from megatron_vp.jobs.job_config import read_job_config

SWITCHES = (
    "vocab_parallel",
    "fake_process_group",
    "multiple_validation_sets",
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
)
VALUES = {
    "pipeline_schedule": None,
    "offload_chunks": "0",
    "core_attention": "megatron",
    "transformer_impl": "transformer_engine",
    "rank_report": None,
    "pipeline_trace": None,
    "log_pipeline_interval": 0,
    "tensorboard_dir": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
}
"""Arguments with one value, and their defaults."""
LISTS = ("iterations_to_skip",)


def early_arguments(words: list[str]) -> argparse.Namespace:
    """Read the arguments that the conditions of patch groups use, and return them under Megatron's names.

    Raises UserError for a configuration file that cannot be read.
    """
    files, flags = split_config(words)
    first = next((place for place, word in enumerate(flags) if word.startswith("--")), len(flags))
    given = read_job_config(files, flags[first:]).values
    args = argparse.Namespace()
    for name in SWITCHES:
        setattr(args, name, given.get(name) is True)
    for name, default in VALUES.items():
        value = given.get(name)
        setattr(args, name, default if value is None or isinstance(value, bool | list) else str(value))
    for name in LISTS:
        value = given.get(name)
        setattr(args, name, value if isinstance(value, list) else [] if value is None else [value])
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return args
