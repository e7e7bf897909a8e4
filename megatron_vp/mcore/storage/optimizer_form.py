"""Restricts the format in which training loops other than Megatron's save the distributed optimizer's state.

Megatron's default format (`dp_reshardable`) stores a rank's raw buffers under keys that do not name parameters. With
our schedules, these buffers differ from plain Megatron's: both vocabulary layers are split over the ranks, and a
V-shaped placement also moves transformer layers to other ranks. A run with another layout would load the buffers
without an error, and train with optimizer moments that belong to other parameters. If Megatron parses the arguments,
`optimizer_check` compares the layouts at startup. A checkpoint of another training loop does not record its layout, so
only a format that fits every layout is accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import Patch

_TAKEN = "fully_reshardable"
_OF_ONE_LAYOUT = {"dp_reshardable": "dp_reshardable", "dp_zero_gather_scatter": "dp_zero"}
"""Each key is a format that loads correctly only with the layout of the run that wrote it. Each value is the suffix in
the name of the Megatron function that writes this format.
"""


def _refusing(form: str, _original: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_param_state(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
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


PATCHES = tuple(
    Patch(
        f"megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_{function}",
        partial(_refusing, form),
        f"a run that splits the model differently over its ranks would load optimizer state in the format {form} into "
        "the wrong parameters",
    )
    for form, function in _OF_ONE_LAYOUT.items()
)
"""Applied in scripts that have their own training loop and use one of our schedules."""

BRIDGE_PATCHES = (
    Patch(
        "megatron.bridge.training.checkpointing:_build_sharded_state_dict_metadata",
        _always_reshardable,
        "optimizer state in Megatron-Bridge's default format loads correctly only if the model is split over the ranks "
        "as in the run that saved the state",
    ),
)
"""Applied in scripts that have imported Megatron-Bridge's training loop and use one of our schedules."""
