"""Refuses optimizer state that Megatron would load into the wrong parameters.

Megatron's default format (`dp_reshardable`) stores a rank's raw buffers under keys that do not name parameters. With
our schedules, these buffers differ from plain Megatron's: both vocabulary layers are split over the ranks, and a
V-shaped placement also moves transformer layers to other ranks. A run with another layout would load the buffers
without an error, and train with optimizer moments that belong to other parameters. If Megatron parses the arguments,
`check_optimizer` compares the layouts at startup. A checkpoint of another training loop does not record its layout, so
the patches accept only a format that fits every layout.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.settled import ROLES, is_plain
from megatron_vp.schedule import Placement


def check_optimizer(args: Arguments, written_by: argparse.Namespace, common: dict[str, Any], folder: Path) -> None:
    """Raise UserError if Megatron would load optimizer state into the wrong parameters, as it does if the state is in
    the distributed optimizer's default format and this run splits the model differently.

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
            f"and is {asked[name]} in this run: give the old value, and save with --dist-ckpt-optim-fully-reshardable "
            "for other splits, or add --no-load-optim to start with a fresh optimizer"
        )


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


_TAKEN = "fully_reshardable"
_OF_ONE_LAYOUT = ("dp_reshardable", "dp_zero_gather_scatter")
"""Formats that load correctly only with the layout of the run that wrote them."""


def _refusing(form: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_param_state(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        if is_plain(self.model_chunks):
            return original(self, model_sharded_state_dict, is_loading, metadata)
        raise UserError(
            f"the optimizer state in this checkpoint has the format {form}, which can be loaded correctly only if the "
            f"model is split over the ranks as in the run that saved it, but the checkpoint does not record that "
            f"split: let that run save in the format {_TAKEN} (in Megatron-Bridge, set "
            f"checkpoint.dist_ckpt_optim_fully_reshardable=True), or start with a fresh optimizer (load_optim=False)"
            if is_loading
            else f"this training loop saves the distributed optimizer's state in the format {form}, which a run that "
            f"splits the model differently over its ranks would load into the wrong parameters: call the optimizer's "
            f'sharded_state_dict with metadata={{"distrib_optim_sharding_type": "{_TAKEN}"}}'
        )

    return sharded_param_state


def _always_reshardable(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def build_metadata(use_distributed_optimizer: bool, cfg: Any) -> dict[str, Any]:
        metadata = original(use_distributed_optimizer, cfg)
        if metadata.get("distrib_optim_sharding_type") in _OF_ONE_LAYOUT:
            metadata["distrib_optim_sharding_type"] = _TAKEN
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = (
                cfg.distrib_optim_fully_reshardable_mem_efficient
            )
        return metadata

    return build_metadata


_refusing_reshardable, _refusing_gathered = (partial(_refusing, form) for form in _OF_ONE_LAYOUT)
