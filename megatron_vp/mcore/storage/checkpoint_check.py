"""Checks, before any process group exists, that a run can load its checkpoint without silent damage.

Without these checks, Megatron starts from random weights if it finds no checkpoint, ignores an untied output layer, and
loads optimizer state into other parameters. Files that are damaged or missing make the loading itself fail.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megatron_vp.errors import UserError, printable
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.settled import run_settings
from megatron_vp.mcore.storage.checkpoint_files import TRACKER
from megatron_vp.mcore.storage.optimizer_state import check_optimizer


def check_checkpoint(args: Arguments) -> str | None:
    """Check the checkpoint named in Megatron's validated arguments, without reading its tensors.

    Returns the directory of the checkpoint; None if the run starts from scratch, or if the checkpoint is not checked.

    Checkpoints on object storage and node-local checkpoints (`--non-persistent-ckpt-type local`) are not checked.
    Megatron's older torch format is accepted only if ranks hold the same layers as in plain Megatron. Files in this
    format are not checked. An empty directory is accepted if the run also saves to it. Raises UserError if the
    checkpoint cannot be used.
    """
    option, load, finetunes = "--load", args.load, args.finetune
    if any("://" in str(place) for place in (load, args.pretrained_checkpoint, args.non_persistent_global_ckpt_dir)):
        return None
    if args.pretrained_checkpoint is not None and (load is None or not (Path(load) / TRACKER).is_file()):
        option, load, finetunes = "--pretrained-checkpoint", args.pretrained_checkpoint, True
    if load is None or args.non_persistent_ckpt_type == "local":
        return None
    folder: Path | None = Path(load) / TRACKER
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns about reads by a single process, which are intended here.
            folder = _chosen(load, args)
            common = _common_state(folder, args)
    except UserError:
        raise
    except (Exception, SystemExit, CheckpointException) as error:  # Not all of them derive from Exception.
        fault = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        said = printable(str(fault)) or "it contains no number of an iteration"
        raise UserError(
            f"cannot read {folder}: {said}; load another iteration with --ckpt-step, or leave {option} out to start "
            "from scratch"
        ) from error
    if folder is not None:
        if common:
            _check(args, common, folder, finetunes or folder.name == "release")
        return str(folder)
    to_load = option == "--load"
    if to_load and args.save is not None and Path(args.save) == Path(load) and not args.exit_on_missing_checkpoint:
        return None  # The first attempt of a run that resumes later.
    then = "; for a new run that saves to this directory, keep --load and set --save to it" * to_load
    raise UserError(
        f"{option} {load} contains no checkpoint (no file {TRACKER}): use the directory that a run saved to, or leave "
        f"{option} out{then}"
    )


def _chosen(load: str, args: Arguments) -> Path | None:
    """Return the directory of the iteration that Megatron loads, as its `_load_base_checkpoint` chooses it."""
    from megatron.training.checkpointing import _get_non_persistent_iteration, get_checkpoint_name, read_metadata

    fleeting = args.non_persistent_global_ckpt_dir or os.path.join(load, "non_persistent")
    newest, tracker = _get_non_persistent_iteration(fleeting, args), Path(load) / TRACKER
    iteration, release = read_metadata(tracker) if tracker.is_file() else (-1, False)
    iteration = args.ckpt_step or iteration
    if newest >= max(iteration, 0):
        return Path(get_checkpoint_name(fleeting, newest, return_base_dir=True))
    return None if iteration < 0 else Path(get_checkpoint_name(load, iteration, release, return_base_dir=True))


def _common_state(folder: Path | None, args: Arguments) -> dict[str, Any] | None:
    """Read a checkpoint without its tensors. The result has the writing run's arguments and optimizer settings. None
    without a checkpoint, and for Megatron's older format.
    """
    from megatron.core.dist_checkpointing import load_common_state_dict

    if folder is None:
        return None
    if not any(folder.glob("mp_rank_*")):
        return load_common_state_dict(str(folder))
    # Megatron's older format has one file per rank, so ranks must hold the same layers as in plain Megatron.
    if args.vocab_parallel or run_settings(args).places_chunks:
        raise UserError(
            f"{folder} is in Megatron's older torch format, which this run cannot load: convert it in a run that "
            "has the checkpoint's parallel sizes but neither --vocab-parallel nor --pipeline-schedule "
            "(--ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save DIR), and load the result"
        )
    return None


def _check(args: Arguments, common: dict[str, Any], folder: Path, finetunes: bool) -> None:
    written_by = common.get("args")
    untied = getattr(written_by, "untie_embeddings_and_output_weights", False)
    if untied and not args.untie_embeddings_and_output_weights:  # Megatron would silently ignore the output layer.
        raise UserError(
            f"the checkpoint {folder} has an untied output layer, which the tied model of this run would ignore: add "
            "--untie-embeddings-and-output-weights"
        )
    if written_by is not None and not (finetunes or args.no_load_optim or args.skip_train):
        check_optimizer(args, written_by, common, folder)
