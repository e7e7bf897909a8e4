"""The checkpoint that a run is to load, checked before any process group exists: there, whole, and of a form that fits.

Megatron starts from random weights where it finds nothing, and fails on some ranks, at different times, where a file
is damaged. Neither is what somebody wants who asked for a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text
from megatron_vp.mcore.storage.checkpoint_files import TRACKER
from megatron_vp.mcore.storage.checkpoint_metadata import read_metadata
from megatron_vp.schedule import V_SHAPED_SCHEDULES

_PARTS = ("metadata.json", ".metadata")

# What decides how a rank's parameters lie in the buffers of the distributed optimizer, and its value where a checkpoint
# knows nothing of it.
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


def check_checkpoint(args: argparse.Namespace) -> None:
    """Check the checkpoint that validated Megatron arguments ask for; reads its metadata only.

    Left to Megatron: checkpoints on object storage, non-persistent ones, and formats other than torch_dist. An empty
    directory is where a run starts that saves to and loads from the same place. Raises UserError, for an asynchronous
    save by a package that is not installed, too.
    """
    if args.async_save and args.async_strategy == "nvrx" and find_spec("nvidia_resiliency_ext") is None:
        raise UserError(
            "--async-save writes with nvidia-resiliency-ext, which is not installed: use --async-strategy mcore, "
            "Megatron's own writer, or install it"
        )
    if args.load is None or "://" in str(args.load) or args.non_persistent_ckpt_type is not None:
        return
    folder = _folder(args)
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(f"the checkpoint {folder} is not there; {_others(folder)}")
    if not any((folder / name).exists() for name in _PARTS):
        if any(folder.glob("mp_rank_*")):
            return _check_ranks_own_files(args, folder)
        raise UserError(f"{folder} holds no checkpoint of Megatron's torch_dist format; {_others(folder)}")
    damage = _damage(folder)
    if damage is not None:
        raise UserError(f"{damage}; {_others(folder)}")
    common = _common_state(folder)
    written_by = common.get("args")
    if written_by is None:
        return
    _check_tying(args, written_by, folder)
    if not (args.no_load_optim or args.finetune or args.skip_train or folder.name == "release"):
        _check_optimizer_form(args, written_by, common, folder)
        _check_optimizer_schedule(args, common, folder)


def _folder(args: argparse.Namespace) -> Path | None:
    """The directory of the iteration to load; None where the run starts afresh."""
    load = Path(args.load)
    if args.ckpt_step is not None:
        return load / f"iter_{args.ckpt_step:07d}"
    tracker = load / TRACKER
    if not tracker.is_file():
        resumes_later = args.save is not None and Path(args.save) == load and not args.exit_on_missing_checkpoint
        if resumes_later or args.pretrained_checkpoint is not None:
            return None
        raise UserError(
            f"--load {load} holds no checkpoint (no {TRACKER}): give the directory that a run saved to, or leave "
            f"--load out; a run that is to start here and resume later gives --save the same directory"
        )
    said = read_text(tracker, "the name of the last checkpoint", MIB, errors="replace").strip()
    if said == "release":
        return load / said
    if not (said.isdecimal() and len(said) < 20):
        raise UserError(f"{tracker} is corrupt: it holds {said[:80]!r} and not an iteration; {_others(load / 'iter')}")
    return load / f"iter_{int(said):07d}"


def _check_ranks_own_files(args: argparse.Namespace, folder: Path) -> None:
    """Megatron's format before torch_dist, a file for each rank, needs ranks that hold what plain Megatron's hold."""
    if args.vocab_parallel or args.pipeline_schedule in V_SHAPED_SCHEDULES:
        raise UserError(
            f"{folder} is in Megatron's format before torch_dist, whose files fit the ranks of plain Megatron alone: "
            f"convert it in a plain run (--ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save DIR) "
            f"and use that"
        )


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if its metadata can be read and no file is shorter than it says."""
    missing = [name for name in _PARTS if not (folder / name).is_file()]
    if missing:
        return f"the checkpoint {folder} lacks {' and '.join(missing)}"
    part = _PARTS[0]
    try:
        json.loads((folder / part).read_bytes())
        part = _PARTS[1]
        stored = read_metadata(folder).storage_data
    except Exception as error:  # whatever reading a damaged file comes upon
        return f"{folder / part} is corrupt ({_brief(error)})"
    ends: dict[str, int] = {}
    for piece in stored.values():
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            return f"{path} {'is missing' if size is None else f'is cut short: {size} of {end} bytes'}"
    return None


def _common_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors: the arguments of the run that wrote it, and optimizer settings."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being read by a single process
        try:
            return load_common_state_dict(str(folder))
        except Exception as error:
            raise UserError(f"the checkpoint {folder} is corrupt ({_brief(error)}); {_others(folder)}") from error


def _check_tying(args: argparse.Namespace, written_by: argparse.Namespace, folder: Path) -> None:
    """Megatron passes over weights that a model has no place for: an output layer would be lost in silence."""
    untied = getattr(written_by, "untie_embeddings_and_output_weights", False)
    if untied and not args.untie_embeddings_and_output_weights:
        raise UserError(
            f"the model in {folder} has an output layer of its own, which this run would drop: add "
            f"--untie-embeddings-and-output-weights"
        )


def _check_optimizer_form(
    args: argparse.Namespace, written_by: argparse.Namespace, common: dict[str, Any], folder: Path
) -> None:
    """Megatron reads optimizer state only into the kind of optimizer that wrote it, and the distributed optimizer's
    default form, which stores its buffers as they lie, only in the same layout.
    """
    distributed = getattr(written_by, "use_distributed_optimizer", args.use_distributed_optimizer)
    if distributed != args.use_distributed_optimizer:
        raise UserError(
            f"the optimizer state in {folder} was written {'with' if distributed else 'without'} "
            f"--use-distributed-optimizer, and Megatron cannot read it {'without' if distributed else 'with'} it: "
            f"{'add it' if distributed else 'leave it out'}, or go on with a fresh optimizer by --no-load-optim"
        )
    there, here = (getattr(each, "expert_model_parallel_size", 1) for each in (written_by, args))
    # Only experts that are spread have an optimizer of their own, and its state other names.
    if args.num_experts and (there > 1) != (here > 1):
        raise UserError(
            f"Megatron cannot load the optimizer state in {folder}, saved with --expert-model-parallel-size {there}, "
            f"with {here}: keep both at 1 or both above, or go on with a fresh optimizer by --no-load-optim"
        )
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if form != "dp_reshardable":
        return
    written, asked = _layout(written_by), _layout(args)
    for name, there in written.items():
        if there != (here := asked[name]):
            raise UserError(
                f"the optimizer state in {folder} is in the distributed optimizer's default form (dp_reshardable), "
                f"which fits only the layout that wrote it, and there {name} was {there}, here it is {here}: write it "
                f"with --dist-ckpt-optim-fully-reshardable, or go on with a fresh optimizer by --no-load-optim"
            )


def _check_optimizer_schedule(args: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Megatron goes on only with the very course of learning rate and weight decay, unless told which one to take."""
    told = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if told or not (args.train_iters or args.train_samples):  # Megatron refuses a run without an end itself
        return
    written = common.get("opt_param_scheduler", {})
    for name, here in _course(args).items():
        if (there := written.get(name, here)) != here:
            raise UserError(
                f"learning rate and weight decay would not go on as in {folder}, where {name} is {there} and here "
                f"{here} (steps are samples): add --override-opt-param-scheduler to go on with the new values, as "
                f"after a change of --train-iters or of the batch, or --use-checkpoint-opt-param-scheduler with the old"
            )


def _course(args: argparse.Namespace) -> dict[str, Any]:
    """What Megatron makes its OptimizerParamScheduler of (`get_optimizer_param_scheduler`), by its names."""
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
    # The same string places other layers on a rank where the second chunks are laid out backwards.
    layout["a V-shaped pipeline_schedule"] = getattr(args, "pipeline_schedule", None) in V_SHAPED_SCHEDULES
    return layout


def _others(folder: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    steps = (other.name.removeprefix("iter_") for other in folder.parent.glob("iter_*") if other != folder)
    for step in sorted(map(int, filter(str.isdecimal, steps)), reverse=True):
        if _damage(folder.parent / f"iter_{step:07d}") is None:
            return f"use --ckpt-step {step}, the newest other one that is whole"
    return f"{folder.parent} holds no other checkpoint that is whole: check --load, or leave it out to start afresh"


def _brief(error: Any) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:200]
