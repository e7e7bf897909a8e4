"""Checks, before any process group exists, that Megatron can load the optimizer state of a run's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.schedule import Placement

# The arguments that determine the positions of a rank's parameters in the distributed optimizer's buffers. The value
# given here is assumed if a checkpoint does not record the argument.
_LAYOUT: dict[str, Any] = {
    "expert_model_parallel_size": 1,
    "vocab_parallel": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "hybrid_layer_pattern": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def check_optimizer(args: Arguments, written_by: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Raise UserError if this run cannot load the optimizer state of a checkpoint.

    args: this run's arguments, validated by Megatron.
    written_by: the arguments of the run that wrote the checkpoint.
    common: everything in the checkpoint except tensors.
    """
    if args.optimizer == "sgd":
        raise UserError(
            f"--optimizer sgd cannot resume from {folder}, because Megatron cannot load the state of this optimizer: "
            "add --no-load-optim to start with a fresh optimizer"
        )
    _check_form(args, written_by, common, folder)
    _check_rates(args, written_by, common.get("opt_param_scheduler", {}), folder)


def _refuse(folder: Path, fault: str, instead: str) -> NoReturn:
    raise UserError(
        f"the optimizer state in {folder} {fault}: {instead}, or add --no-load-optim to start with a fresh optimizer"
    )


def _check_given(folder: Path, option: str, there: bool, here: bool, value: str = "") -> None:
    """Refuse optimizer state that was written with `option` to a run without it, and the reverse."""
    if there != here:
        before, now, instead = (
            ("with", "without", f"add {option}{value}") if there else ("without", "with", f"leave {option} out")
        )
        _refuse(folder, f"was written {before} {option}, and Megatron cannot read it {now} that option", instead)


def _check_form(args: Arguments, written_by: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check that this run can read the format of the optimizer state. Megatron loads the state only into the kind of
    optimizer that wrote it. Only a run with the same parallel layout can load the distributed optimizer's default
    format.
    """
    if (written := getattr(written_by, "optimizer", args.optimizer)) != args.optimizer:
        fault = f"was written with --optimizer {written}, and --optimizer {args.optimizer} cannot read it"
        _refuse(folder, fault, f"use --optimizer {written}")
    distributed = _is_distributed(args)
    _check_given(folder, "--use-distributed-optimizer", _is_distributed(written_by, distributed), distributed)
    there, here = (getattr(each, "expert_model_parallel_size", 1) for each in (written_by, args))
    # Experts that are distributed over ranks have a separate optimizer. In a checkpoint, the state of two optimizers
    # has different keys from the state of one optimizer for all parameters.
    if args.num_experts and (there > 1) != (here > 1):
        fault = f"was written with --expert-model-parallel-size {there}, and Megatron cannot read it with size {here}"
        _refuse(folder, fault, "use size 1 in both runs or a larger size in both")
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if form != "dp_reshardable":
        return
    written, asked = _layout(written_by), _layout(args)
    for name, there in written.items():
        if there != (here := asked[name]):
            _refuse(
                folder,
                "is in the distributed optimizer's default format (dp_reshardable), which only a run with the same "
                f"model split can read, but {name} was {there} in the run that wrote it and is {here} in this run",
                "resume with the old split and save with --dist-ckpt-optim-fully-reshardable",
            )


def one_way(args: Arguments) -> str | None:
    """Describe what the checkpoints of a run tie later runs to, and how to avoid it; None if nothing."""
    one_stage = args.pipeline_model_parallel_size == 1
    if one_stage or args.save is None or args.dist_ckpt_optim_fully_reshardable or not _is_distributed(args):
        return None
    return (
        f"only a run with the same model split, {'with' if args.vocab_parallel else 'without'} --vocab-parallel, can "
        "load the optimizer state of this job: add --dist-ckpt-optim-fully-reshardable if you may want to switch"
    )


def _is_distributed(args: Arguments, absent: bool = False) -> bool:
    """Whether a run distributes the optimizer, either by elements (as usual) or by whole weights (as with Muon)."""
    by_elements = getattr(args, "use_distributed_optimizer", absent)
    return by_elements or getattr(args, "use_layer_wise_distributed_optimizer", False)


def _check_rates(args: Arguments, written_by: argparse.Namespace, written: dict[str, Any], folder: Path) -> None:
    """Compare learning rates with the checkpoint's. Megatron matches parameter groups by both decoupled rates, and
    requires the same schedule by default.
    """
    told = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    for name in ("decoupled_lr", "decoupled_min_lr"):
        option, here, there = option_of(name), getattr(args, name), getattr(written_by, name, None)
        if name == "decoupled_lr":
            _check_given(folder, option, there is not None, here is not None, f" {there}")
        if here != there and not told:
            raise UserError(
                f"{option} was {there} in the run that wrote {folder}, but is {here} in this run: add "
                "--override-opt-param-scheduler to continue with the new learning rate, or "
                "--use-checkpoint-opt-param-scheduler to continue with the old one"
            )
    if told or not written or not (args.train_iters or args.train_samples):  # Megatron refuses a run without length.
        return
    from megatron.training import training  # Importing it takes long, and most runs load no optimizer state here.

    ours = argparse.Namespace(**vars(args))  # Megatron writes defaults into the arguments.
    with mock.patch.object(training, "get_args", lambda: ours):
        course = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    try:
        course.load_state_dict(written)
    except AssertionError as error:
        raise UserError(
            f"the schedule of learning rate and weight decay differs from the schedule in {folder} ({error}; steps are "
            "counted in samples): add --override-opt-param-scheduler to continue with the new values, for example "
            "after a change of --train-iters or the batch size, or --use-checkpoint-opt-param-scheduler to continue "
            "with the old values"
        ) from error


def _layout(args: Arguments) -> dict[str, Any]:
    layout = {name: getattr(args, name, absent) for name, absent in _LAYOUT.items()}
    rows = getattr(args, "vocab_rows", None)
    layout["--vocab-shards"] = "even" if rows is None else ",".join(map(str, rows))
    # If chunks are placed differently, the same layout string puts different layers on a rank.
    layout["the placement of chunks"] = _placement(args, layout)
    return layout


def _placement(args: Arguments, layout: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages of each rank's chunks. Our runs record the placement if it differs from Megatron's."""
    recorded = getattr(args, "chunk_placement", None)
    if recorded is not None:
        return tuple(map(tuple, recorded))
    ranks, chunks = layout["pipeline_model_parallel_size"], layout["virtual_pipeline_model_parallel_size"] or 1
    return Placement.round_robin(ranks, chunks).stage_of
