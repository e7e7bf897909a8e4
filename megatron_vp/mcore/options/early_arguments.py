"""What a command line says before Megatron's parser exists, as far as it decides which patches apply.

Megatron's own parser is patched itself, and nothing is patched before everything that a run needs has been checked. So
a parser of the few arguments that matter reads the same words first: configuration files, then the command line. What
it passes over and whatever is malformed is left to Megatron's parser, and the groups are selected again from the
validated arguments.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import split_config
from megatron_vp.jobs.yaml_files import read_leaves
from megatron_vp.schedule import DEFAULT_SCHEDULE

SWITCHES = (
    ("--vocab-parallel",),
    ("--fake-process-group",),
    ("--multiple-validation-sets",),
    ("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
    ("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
)
VALUES = {
    "--pipeline-schedule": DEFAULT_SCHEDULE,
    "--core-attention": "megatron",
    "--transformer-impl": "transformer_engine",
    "--rank-report": None,
    "--tensorboard-dir": None,
    "--heterogeneous-layers-config-path": None,
    "--heterogeneous-layers-config-encoded-json": None,
}
"""Options with one value, and the value of a run that does not give them."""
LISTS = ("--iterations-to-skip",)


class Parser(argparse.ArgumentParser):
    """Reports what it cannot parse as a UserError."""

    def error(self, message: str) -> Any:
        """Raise UserError, with a hint."""
        raise UserError(f"{message}; `--help` lists all options")


def early_arguments(words: list[str]) -> argparse.Namespace:
    """The arguments on which conditions of patch groups may depend, by Megatron's names.

    Raises UserError for a configuration file that cannot be read and for an option without its value.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for names in SWITCHES:
        parser.add_argument(*names, action="store_true")
    for name, default in VALUES.items():
        parser.add_argument(name, default=default)
    for name in LISTS:
        parser.add_argument(name, nargs="*", default=[])
    leaves = {leaf.key: leaf.value for leaf in read_leaves(split_config(words)[0])}
    for action in parser._actions:
        value = leaves.get(action.dest)
        kind = bool if action.nargs == 0 else list if action.nargs == "*" else str
        if isinstance(value, kind):
            action.default = value
    args = parser.parse_known_args(words)[0]
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return args
