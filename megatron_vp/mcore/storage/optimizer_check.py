"""Checks, before any process group exists, that Megatron can load the optimizer state of a run's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.settled import ROLES
from megatron_vp.schedule import Placement


def check_optimizer(args: Arguments, written_by: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Raise UserError if the learning rate's course differs from a checkpoint's, or if Megatron would load optimizer
    state into the wrong parameters, as it does if the state is in the distributed optimizer's default format and this
    run splits the model differently.

    args: this run's arguments, validated by Megatron.
    written_by: the arguments of the run that wrote the checkpoint.
    common: everything in the checkpoint except tensors.
    """
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    written, asked = _layout(written_by), _layout(args)
    name = next((name for name in written if written[name] != asked[name]), None)
    if form == "dp_reshardable" and name is not None:
        raise UserError(
            f"the optimizer state in {folder} is in the distributed optimizer's default format (dp_reshardable), which "
            f"only a run with the same model split can read, but {name} was {written[name]} in the run that wrote it "
            f"and is {asked[name]} in this run: resume with the old split and save with "
            "--dist-ckpt-optim-fully-reshardable, or add --no-load-optim to start with a fresh optimizer"
        )
    told = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    saved = common.get("opt_param_scheduler")
    if told or not saved or not (args.train_iters or args.train_samples):  # Megatron refuses a run without length.
        return
    from megatron.training import training  # Importing it takes long, and most runs load no optimizer state here.

    ours = argparse.Namespace(**vars(args))  # Megatron writes defaults into the arguments.
    with mock.patch.object(training, "get_args", lambda: ours):
        course = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    try:
        course.load_state_dict(saved)
    except AssertionError as error:
        raise UserError(
            f"the schedule of learning rate and weight decay differs from the schedule in {folder} ({error}; steps are "
            "counted in samples): add --override-opt-param-scheduler to continue with the new values, for example "
            "after a change of --train-iters or the batch size, or --use-checkpoint-opt-param-scheduler to continue "
            "with the old values"
        ) from error


def one_way(args: Arguments) -> str | None:
    """Describe what the checkpoints of a run tie later runs to, and how to avoid it; None if nothing."""
    distributed = args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer
    one_stage = args.pipeline_model_parallel_size == 1
    if one_stage or args.save is None or args.dist_ckpt_optim_fully_reshardable or not distributed:
        return None
    return (
        f"only a run with the same model split, {'with' if args.vocab_parallel else 'without'} --vocab-parallel, can "
        "load the optimizer state of this job: add --dist-ckpt-optim-fully-reshardable if you may want to switch"
    )


def _layout(args: Arguments) -> dict[str, Any]:
    layout = {name: getattr(args, name, None) or "not set" for name in ROLES["split"]}
    rows = getattr(args, "vocab_rows", None)
    layout["--vocab-shards"] = "even" if rows is None else ",".join(map(str, rows))
    # If chunks are placed differently, the same layout string puts different layers on a rank.
    layout["the placement of chunks"] = _placement(args)
    return layout


def _placement(args: Arguments) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages of each rank's chunks. Our runs record the placement if it differs from Megatron's."""
    recorded = getattr(args, "chunk_placement", None)
    if recorded is not None:
        return tuple(map(tuple, recorded))
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    return Placement.round_robin(args.pipeline_model_parallel_size, chunks).stage_of
