"""Adds the plug-in's arguments to Megatron's own parser, expands configuration files, and checks the result.

The module wraps Megatron's own functions, so that unmodified training scripts accept the arguments too. This module
runs on every rank, before any process group exists.
"""

from __future__ import annotations

import argparse
import functools
import io
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import split_config
from megatron_vp.jobs.config_words import arguments_from_config, arguments_from_leaves
from megatron_vp.jobs.known_options import Arguments, Parser
from megatron_vp.jobs.resolved import RESOLVED_NAME, write_resolved
from megatron_vp.jobs.yaml_files import Leaf
from megatron_vp.mcore import patch_table
from megatron_vp.mcore.options.settle import settled_from_flags
from megatron_vp.mcore.platform.flags import platform_arguments, switch_off_what_needs_a_gpu, uses_cpu
from megatron_vp.mcore.settled import Words, process
from megatron_vp.schedule import FAMILIES


class _HelpFormatter(argparse.HelpFormatter):
    """Shows help texts unformatted if argparse cannot format them: some of Megatron's help texts contain a bare `%`."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


class _Parser(Parser):
    """A parser that puts `platform_arguments` and the options of configuration files before the command line."""

    def parse_call(self, settings: Mapping[str, Any]) -> tuple[Arguments, tuple[str, ...]]:
        """Parse the settings passed to `megatron_vp.enable`. Returns the arguments, and the settings as flags. Raises
        UserError.
        """
        leaves = [Leaf(Path("megatron_vp.enable"), "its call", name, value) for name, value in settings.items()]
        words = arguments_from_leaves(leaves, self)
        chosen = platform_arguments(words, uses_cpu([]))
        return Arguments(vars(super().parse_known_args(chosen + words)[0])), tuple(words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse `args`, as `parse_args` does through this function."""
        if args is None and process.words.all and tuple(sys.argv[1:]) == process.words.all:
            # Part of Megatron parses the complete command line again, without the script's own options.
            return super().parse_known_args(None, namespace)
        given = list(sys.argv[1:] if args is None else args)
        called = list(process.own_loop.words) if process.own_loop else []
        given = called + arguments_from_config(split_config(given)[0], self) + given
        chosen = platform_arguments(given, uses_cpu([]))
        # Write the complete command line to `sys.argv`, because parts of Megatron parse it again.
        sys.argv[1:] = chosen + given
        parsed, unknown = super().parse_known_args(sys.argv[1:], namespace)
        process.words = Words(tuple(sys.argv[1:]), tuple(chosen))
        if parsed.yaml_cfg is not None:
            raise UserError(f"--yaml-cfg {parsed.yaml_cfg} bypasses Megatron's checks: use --config FILE.yaml instead")
        return parsed, unknown


_TYPES = {"int": int, "float": float}


def with_ours(original: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """Wrap Megatron's function that adds arguments to a parser, so that it adds ours too and turns the parser into a
    `_Parser`.
    """

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        parser.__class__, parser.formatter_class = _Parser, _HelpFormatter
        ours = parser.add_argument_group("vocabulary parallelism and schedules (megatron_vp)")
        for option in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["option"]:
            if "type" in option:
                option["type"] = _TYPES[option["type"]]
            option["help"] = option["help"].replace("{families}", ", ".join(FAMILIES))
            ours.add_argument(option.pop("name"), **option)
        return parser

    return add_megatron_arguments


def our_parser() -> argparse.ArgumentParser:
    """A parser with only our arguments."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    with_ours(lambda unchanged: unchanged)(parser)
    return parser


def _with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
        if not hasattr(args, "pipeline_schedule"):
            raise UserError(
                "this script validates arguments that lack our options, because it parsed them before the plug-in was "
                "on, or with a parser of its own: call megatron_vp.enable first, and parse with Megatron's parse_args"
            )
        said = io.StringIO()
        # Hold back Megatron's dump of its arguments, so that it does not bury the message if the job is refused.
        with redirect_stdout(said):
            job = settled_from_flags(original, args, defaults or {}, files=True)
        print(said.getvalue(), end="", flush=True)
        if uses_cpu([]) and (off := switch_off_what_needs_a_gpu(args)) and args.rank == 0:
            warnings.warn(off, stacklevel=2)
        if args.fake_process_group:
            # In a real job, rank 0 broadcasts this value. A replayed rank receives nothing.
            args.do_train = True
        job = job.of(args)
        process.job = job
        patch_table.apply(job.arguments, early=False)
        return args

    return validate_args


def write_resolved_configuration(args: argparse.Namespace) -> None:
    """Write the values of `args` to the --save folder or, without --save, to the --tensorboard-dir folder. Call this
    function on one rank only. Raises UserError.
    """
    folder = args.save or args.tensorboard_dir
    if folder is not None:
        write_resolved(args, Path(folder) / RESOLVED_NAME)


def _noting_the_vocabulary(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_padded_vocab_size(args: argparse.Namespace, tokenizer: Any) -> None:
        original(args, tokenizer)
        if process.job is not None and process.job.args is args:
            process.job = process.job.of(args)

    return set_padded_vocab_size
