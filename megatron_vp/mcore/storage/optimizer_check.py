"""Checks, before any process group exists, that Megatron will find the optimizer state that a run loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.schedule import DEFAULT_SCHEDULE, FAMILIES, Placement

# The arguments that determine where a rank's parameters lie in the buffers of the distributed optimizer, and the value
# to assume if a checkpoint lacks one.
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


def check_optimizer(
    args: argparse.Namespace, written_by: argparse.Namespace, common: dict[str, Any], folder: Path
) -> None:
    """Check the optimizer state of a checkpoint against validated Megatron arguments.

    written_by: the arguments of the run that wrote it.
    common: the contents of the checkpoint besides tensors.

    Raises UserError.
    """
    if args.optimizer == "sgd":
        raise UserError(
            f"Megatron cannot load the state of --optimizer sgd, which {folder} may hold: start with a fresh optimizer "
            f"by --no-load-optim"
        )
    _check_form(args, written_by, common, folder)
    _check_decoupled_rates(args, written_by, folder)
    _check_schedule(args, common, folder)


def _check_form(args: argparse.Namespace, written_by: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check that the state has a form that this run can read. Megatron reads state only into the kind of optimizer that
    wrote it, and the distributed optimizer's default form, which stores raw buffers, fits only the same layout.
    """
    if (written := getattr(written_by, "optimizer", args.optimizer)) != args.optimizer:
        raise UserError(
            f"the optimizer state in {folder} was written by --optimizer {written}, and --optimizer {args.optimizer} "
            f"cannot read it: continue with --optimizer {written}, or with a fresh optimizer by --no-load-optim"
        )
    distributed = _is_distributed(written_by, _is_distributed(args))
    if distributed != _is_distributed(args):
        raise UserError(
            f"the optimizer state in {folder} was written {'with' if distributed else 'without'} "
            f"--use-distributed-optimizer, and Megatron cannot read it {'without' if distributed else 'with'} it: "
            f"{'add it' if distributed else 'leave it out'}, or start with a fresh optimizer by --no-load-optim"
        )
    there, here = (getattr(each, "expert_model_parallel_size", 1) for each in (written_by, args))
    # Experts have a separate optimizer, whose state has other names, only if they are spread over ranks.
    if args.num_experts and (there > 1) != (here > 1):
        raise UserError(
            f"Megatron cannot load the optimizer state in {folder}, saved with --expert-model-parallel-size {there}, "
            f"with {here}: keep both at 1 or both above, or start with a fresh optimizer by --no-load-optim"
        )
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if form != "dp_reshardable":
        return
    written, asked = _layout(written_by), _layout(args)
    for name, there in written.items():
        if there != (here := asked[name]):
            raise UserError(
                f"the optimizer state in {folder} is in the distributed optimizer's default form (dp_reshardable), "
                f"which fits only the layout that wrote it, and {name} was {there} in that run but is {here} in this "
                "one: write it with --dist-ckpt-optim-fully-reshardable, or start with a fresh optimizer by "
                "--no-load-optim"
            )


def _is_distributed(args: argparse.Namespace, absent: bool = False) -> bool:
    """Whether a run uses one of Megatron's distributed optimizers: split by element, or by whole weight for Muon and
    similar.
    """
    by_elements = getattr(args, "use_distributed_optimizer", absent)
    return by_elements or getattr(args, "use_layer_wise_distributed_optimizer", False)


def _check_decoupled_rates(args: argparse.Namespace, written_by: argparse.Namespace, folder: Path) -> None:
    """Check separate learning rates of the vocabulary layers: they create parameter groups, which Megatron finds by
    their rates.
    """
    for name in ("decoupled_lr", "decoupled_min_lr"):
        here, there = getattr(args, name), getattr(written_by, name, None)
        if here == there:
            continue
        option = f"--{name.replace('_', '-')}"
        if name == "decoupled_lr" and None in (here, there):
            raise UserError(
                f"the optimizer state in {folder} was written {'without' if there is None else 'with'} {option}, and "
                f"Megatron cannot read it {'with' if there is None else 'without'} it: "
                f"{'leave it out' if there is None else f'add {option} {there}'}, or start with a fresh optimizer by "
                f"--no-load-optim"
            )
        if not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
            raise UserError(
                f"learning rates would not continue as in {folder}, where {option} is {there} and here {here}: add "
                "--override-opt-param-scheduler to continue with the new value, or "
                "--use-checkpoint-opt-param-scheduler with the old"
            )


def _check_schedule(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Check the learning rate schedule: without an option that says which one to use, Megatron continues only with the
    same.
    """
    told = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if told or not (args.train_iters or args.train_samples):  # Megatron itself refuses a run without an end
        return
    written = common.get("opt_param_scheduler", {})
    for name, here in learning_course(args).items():
        if (there := written.get(name, here)) != here:
            raise UserError(
                f"learning rate and weight decay would not continue as in {folder}, where {name} is {there} and here "
                f"{here} (steps are samples): add --override-opt-param-scheduler to continue with the new values, as "
                f"after a change of --train-iters or of the batch, or --use-checkpoint-opt-param-scheduler with the old"
            )


def learning_course(args: argparse.Namespace) -> dict[str, Any]:
    """The values with which Megatron creates its OptimizerParamScheduler (in `get_optimizer_param_scheduler`), by
    argument name.
    """
    if args.train_iters:
        batch = args.global_batch_size
        length, decay, warmup = args.train_iters, args.lr_decay_iters, args.lr_warmup_iters
    else:
        batch = 1
        length, decay, warmup = args.train_samples, args.lr_decay_samples, args.lr_warmup_samples
    decay_steps = (length if decay is None else decay) * batch
    fraction = args.lr_warmup_fraction
    return {
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_warmup_steps": warmup * batch if fraction is None else fraction * decay_steps,
        "lr_decay_steps": decay_steps,
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": length * batch,
        "wd_incr_style": args.weight_decay_incr_style,
    }


def _layout(args: argparse.Namespace) -> dict[str, Any]:
    layout = {name: getattr(args, name, absent) for name, absent in _LAYOUT.items()}
    rows = getattr(args, "vocab_rows", None)
    layout["--vocab-shards"] = "even" if rows is None else ",".join(map(str, rows))
    # With another placement of chunks, the same layout string puts other layers on a rank.
    layout["the placement of chunks"] = _placement(args, layout)
    return layout


def _placement(args: argparse.Namespace, layout: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The virtual stage of each chunk, by rank. Our runs record it if it differs from Megatron's."""
    recorded = getattr(args, "chunk_placement", None)
    if recorded is not None:
        return tuple(map(tuple, recorded))
    ranks, chunks = layout["pipeline_model_parallel_size"], layout["virtual_pipeline_model_parallel_size"] or 1
    # Our older checkpoints do not record the placement, but they name the schedule family.
    family = FAMILIES.get(getattr(args, "pipeline_schedule", None) or DEFAULT_SCHEDULE)
    if family is not None and not family.in_rounds:
        return family.placement_of(ranks).stage_of
    return Placement.round_robin(ranks, chunks).stage_of
