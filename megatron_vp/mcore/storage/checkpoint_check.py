"""Checks, before any process group exists, that a run can load its checkpoint without silent damage.

Without these checks, Megatron starts from random weights if it finds no checkpoint, ignores an untied output layer, and
loads optimizer state into other parameters. Files that are damaged or missing make the loading itself fail.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megatron_vp.errors import UserError, printable
from megatron_vp.files import MIB, read_text
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.settled import run_settings
from megatron_vp.mcore.storage.checkpoint_files import TRACKER
from megatron_vp.mcore.storage.optimizer_state import check_optimizer

NON_PERSISTENT = "non_persistent"
"""Megatron's folder for non-persistent checkpoints, inside the folder of persistent checkpoints."""


def check_checkpoint(args: Arguments) -> str | None:
    """Check the checkpoint named in Megatron's validated arguments, without reading its tensors.

    Returns the directory of the checkpoint; None if the run starts from scratch, or if the checkpoint is not checked.

    Checkpoints on object storage and node-local checkpoints (`--non-persistent-ckpt-type local`) are not checked.
    Megatron's older torch format is accepted only if ranks hold the same layers as in plain Megatron. Files in this
    format are not checked. An empty directory is accepted if the run also saves to it. Raises UserError if the
    checkpoint cannot be used.
    """
    chosen = _chosen(args)
    if chosen is None:
        return None
    _check(args, *chosen)
    return str(chosen[0])


def _check(args: Arguments, folder: Path, finetunes: bool) -> None:
    if not any((folder / name).exists() for name in ("metadata.json", ".metadata")):
        if not any(folder.glob("mp_rank_*")):
            raise UserError(f"{folder} contains no checkpoint in Megatron's torch_dist format; {_others(folder)}")
        # Megatron's older format has one file per rank, so ranks must hold the same layers as in plain Megatron.
        if args.vocab_parallel or run_settings(args).places_chunks:
            raise UserError(
                f"{folder} is in Megatron's older torch format, which this run cannot load: convert it in a run that "
                "has the checkpoint's parallel sizes but neither --vocab-parallel nor --pipeline-schedule "
                "(--ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save DIR), and load the result"
            )
        return
    common = _common_state(folder)
    written_by = common.get("args")
    if written_by is None:
        return
    untied = getattr(written_by, "untie_embeddings_and_output_weights", False)
    if untied and not args.untie_embeddings_and_output_weights:  # Megatron would silently ignore the output layer.
        raise UserError(
            f"the checkpoint {folder} has an untied output layer, which the tied model of this run would ignore: add "
            "--untie-embeddings-and-output-weights"
        )
    if finetunes or folder.name == "release":
        return
    # Megatron cannot load a checkpoint without its random states, but would still exit with status 0.
    stateless = getattr(written_by, "inference_rng_tracker", False) and not getattr(written_by, "no_save_rng", False)
    if stateless and not args.no_load_rng:
        raise UserError(
            f"the checkpoint {folder} was written with --inference-rng-tracker, so it contains no random states that "
            "Megatron can load: add --no-load-rng"
        )
    if not (args.no_load_optim or args.skip_train):
        check_optimizer(args, written_by, common, folder)


def _chosen(args: Arguments) -> tuple[Path, bool] | None:
    """Return the directory of the iteration that Megatron will load, and whether the run finetunes from this iteration;
    None if the run starts from scratch or the checkpoint is not checked.

    Megatron loads `--pretrained-checkpoint` if the `--load` folder has no tracker file. If there is also a
    non-persistent checkpoint, Megatron loads it unless the persistent one is newer.
    """
    option, load, finetunes = "--load", args.load, args.finetune
    if any("://" in str(place) for place in (load, args.pretrained_checkpoint, args.non_persistent_global_ckpt_dir)):
        return None
    if args.pretrained_checkpoint is not None and (load is None or not (Path(load) / TRACKER).is_file()):
        option, load, finetunes = "--pretrained-checkpoint", args.pretrained_checkpoint, True
    if load is None or args.non_persistent_ckpt_type == "local":
        return None
    load = Path(load)
    fleeting = Path(args.non_persistent_global_ckpt_dir or load / NON_PERSISTENT)
    named = args.ckpt_step is not None and (option == "--load" or (load / TRACKER).is_file())
    saved = [_last(fleeting) if args.non_persistent_ckpt_type == "global" else None]
    saved += [load / f"iter_{args.ckpt_step:07d}" if named else _last(load)]
    if found := max(filter(None, saved), key=_number, default=None):
        return found, finetunes
    to_load = option == "--load"
    if to_load and args.save is not None and Path(args.save) == load and not args.exit_on_missing_checkpoint:
        return None  # The first attempt of a run that resumes later.
    then = "; for a new run that saves to this directory, keep --load and set --save to it" * to_load
    raise UserError(
        f"{option} {load} contains no checkpoint (no file {TRACKER}): use the directory that a run saved to, or leave "
        f"{option} out{then}"
    )


def _last(folder: Path) -> Path | None:
    """Return the directory of the last iteration that was saved to a folder; None if the folder has no tracker file."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    said = read_text(tracker, "the tracker file", MIB, errors="replace").strip()
    if said == "release":
        return folder / said
    if not (said.isdecimal() and len(said) < 20):
        raise UserError(
            f"{tracker} is corrupt: it contains {said[:80]!r} instead of an iteration number; "
            f"{_others(folder / 'iter_')}"
        )
    return folder / f"iter_{int(said):07d}"


def _number(folder: Path) -> int:
    return 0 if folder.name == "release" else int(folder.name.removeprefix("iter_"))


def _common_state(folder: Path) -> dict[str, Any]:
    """Read a checkpoint without its tensors. The result has the writing run's arguments and optimizer settings."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about reads by a single process, which are intended here.
        try:
            return load_common_state_dict(str(folder))
        except (Exception, CheckpointException) as error:  # The latter does not derive from Exception.
            fault = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
            raise UserError(
                f"the checkpoint {folder} is corrupt ({printable(str(fault))}); {_others(folder)}"
            ) from error


def _others(folder: Path) -> str:
    """Advise what to do about an unusable checkpoint, and name the newest other one that was saved completely."""
    found = [each.parent.name.removeprefix("iter_") for each in folder.parent.glob("iter_*/metadata.json")]
    steps = sorted(int(step) for step in found if step.isdecimal() and step != folder.name.removeprefix("iter_"))
    instead = f"load another checkpoint (--ckpt-step {steps[-1]})" if steps else "correct --load"
    return f"{instead}, or leave --load out to start from scratch"
