"""Checks a job's arguments, and the nodes that the job will run on, before the ranks start."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import asks_for_cpu, option_of, split_config
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.jobs.known_options import known_options
from megatron_vp.mcore.platform import environment, installed
from megatron_vp.mcore.platform.pretend_gpu import assumed_nodes, assumptions, pretend_engine, pretend_gpu
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.mcore.start.launch import as_one_line


def check_job(
    arguments: list[str],
    ranks: int,
    here: bool = False,
    nodes: str | None = None,
    own_script: bool = False,
    rehearse: Callable[[SettledJob], Sequence[str]] | None = None,
) -> SettledJob:
    """Parse and validate a job's arguments as its `ranks` processes would, and return the job. Nothing is started.

    Afterwards, the environment and `sys.argv` are restored, and patches are undone. `nodes`, such as
    "te=2.17.1,apex=no", describes the GPU nodes for which arguments are checked. Without it, they are checked for this
    machine's GPUs. On a machine without GPUs, the check assumes typical GPU nodes if Transformer Engine is installed,
    or if the job asks for Transformer Engine's layers or for NCCL. Otherwise, it assumes CPUs. `here` or --cpu forces a
    check for this machine. `rehearse` starts the settled job, whose files are then checked as well, and returns
    warnings. With `own_script`, unknown options are accepted, because they may belong to
    the user's script. Raises UserError for anything that the job would refuse at startup.
    """
    with (
        as_one_line(),
        _platform(arguments, here, nodes),
        redirect_stdout(None),  # Hide what Megatron prints at startup.
        _parsed(arguments, ranks, own_script) as args,
        pretend_engine(),
    ):
        from megatron.training import arguments as megatron
        from megatron.training.argument_utils import core_transformer_config_from_args

        from megatron_vp.mcore.options.refusals import refuse_script_options
        from megatron_vp.mcore.options.settle import settled_from_flags

        if args.use_checkpoint_args:
            _take_sizes_of_checkpoint(args)
        job = settled_from_flags(megatron.validate_args.__wrapped__, args, {}, files=rehearse is not None)
        if not own_script:
            refuse_script_options(job.arguments)
        core_transformer_config_from_args(args)
        if rehearse is not None:
            job = replace(job, warnings=(*job.warnings, *rehearse(job)))
        return job


def own_options(arguments: list[str]) -> dict[str, Any]:
    """A job's options that neither Megatron nor this package knows; they are left to the job's script."""
    values = read_job_config(*split_config(arguments))
    return {name: value for name, value in values.items() if name not in known_options()}


@contextmanager
def without_compilers() -> Iterator[None]:
    """Leave Megatron's fused functions uncompiled inside this context, for a process that only checks jobs.

    To compile these functions, `torch.compile` would import PyTorch's compilers, which takes as long as importing
    Megatron.
    """
    with mock.patch.object(torch, "compile", _uncompiled):
        yield


def _uncompiled(function: Callable | None = None, **options: object) -> Callable:
    return (lambda decorated: decorated) if function is None else function


def _platform(arguments: list[str], here: bool, nodes: str | None = None) -> AbstractContextManager[None]:
    """Return the context in which to check a job: for this machine, or for GPU nodes elsewhere."""
    if nodes is not None:
        if here or asks_for_cpu(arguments):
            raise UserError(
                "--nodes describes GPU nodes other than this machine, so it cannot be combined with --cpu or "
                "--ranks-per-node: leave --nodes out, or leave the other two options out"
            )
        return pretend_gpu(installed.from_text(nodes))
    if here or asks_for_cpu(arguments) or torch.cuda.is_available():
        return nullcontext()
    values = read_job_config(*split_config(arguments))
    machine = assumed_nodes(values.get("transformer_impl") == "transformer_engine")
    on_gpus = machine.engine or machine.engine_fault or values.get("distributed_backend") == "nccl"
    return pretend_gpu(machine) if on_gpus else nullcontext()


def _take_sizes_of_checkpoint(args: argparse.Namespace) -> None:
    """Apply --use-checkpoint-args: take the model's sizes from the run that wrote the checkpoint."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    load_args_from_checkpoint(args)


def check_node(args: argparse.Namespace, ranks_per_node: int) -> None:
    """Raise UserError unless this node has enough GPUs."""
    devices = torch.cuda.device_count() if args.distributed_backend == "nccl" else ranks_per_node
    if devices < ranks_per_node:
        raise UserError(
            f"{socket.gethostname()}: {ranks_per_node} ranks are to run on this node, but the number of visible GPUs "
            f"is {devices}: request one GPU per rank (sbatch --gpus-per-node), and do not bind GPUs to tasks"
        )


def describe_node() -> str:
    """One line with what a run would use on this node, and the variables that NCCL will read."""
    found = [f"{name}: {version}" for name, version, _ in environment.parts()]
    nccl = [f"{name}={value}" for name, value in sorted(os.environ.items()) if "NCCL_" in name]
    return f"{socket.gethostname()}: {'; '.join([*found, *nccl])}"


def describe_job(job: SettledJob, ranks: int) -> list[str]:
    """Lines that describe a checked job on `ranks` ranks, and what follows from where it saves."""
    from megatron_vp.mcore.start.banner import describe_run  # It imports Megatron.

    args, lines = job.arguments, describe_run(job, ranks)
    if job.nodes is not None:
        lines.append(f"the job was checked as if it ran on GPU nodes instead of this machine, {assumptions(job.nodes)}")
    if args.save is None:
        return [*lines, "without --save, a stopped job starts again from iteration 0"]
    if args.save != args.load:
        said = f"--save is {args.save} but --load is {args.load or 'not given'}: a stopped job does not resume"
        return [*lines, said]
    return [*lines, f"the job saves to {args.save}, and resumes from there"]


@contextmanager
def _parsed(arguments: list[str], ranks: int, own_script: bool = False) -> Iterator[argparse.Namespace]:
    """Patch Megatron inside this context, and yield the arguments that it parses.

    The environment is that of a rank after the job's last rank. Code that prints or writes files only on certain ranks
    therefore does not run.
    """

    def with_own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name, value in own_options(arguments).items() if own_script else ():
            kind: dict[str, Any] = {"action": "store_true"} if value is True else {"nargs": "*"}
            parser.add_argument(option_of(name), **kind)
        return parser

    from megatron_vp.mcore import patches, settled
    from megatron_vp.mcore.start import launch

    before = patches.in_force()
    place = mock.patch.dict(os.environ, RANK=str(ranks), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    with place, mock.patch.object(sys, "argv", ["pretrain_gpt_vp.py", *arguments]):
        try:
            launch.patch_megatron(sys.argv)
            from megatron.training import arguments as megatron

            yield megatron.parse_args(with_own)
        finally:
            patches.undo([patch for patch in patches.in_force() if patch not in before])
            settled.begin()
