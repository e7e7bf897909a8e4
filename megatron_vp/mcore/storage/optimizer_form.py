"""Restricts the form in which training loops other than Megatron's keep the distributed optimizer's state in
checkpoints.

Megatron's default form (`dp_reshardable`) stores a rank's raw buffers under keys that do not name parameters. Our
buffers differ: every rank has rows of both vocabulary layers, and in a V a rank holds other layers. Plain Megatron
would load such a state without an error, as we would load that of plain Megatron, and training would continue with the
moments of other parameters. If Megatron parses the arguments, `optimizer_check` compares the two layouts at startup. A
checkpoint of another loop does not record its layout, so only forms that fit every layout are accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.mcore.patches import Patch

_TAKEN = "fully_reshardable"
_OF_ONE_LAYOUT = {"dp_reshardable": "dp_reshardable", "dp_zero_gather_scatter": "dp_zero"}
"""The forms that fit only one layout, and the suffixes of Megatron's functions for them."""


def _refusing(form: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the replacement for Megatron's function for one of these forms; it raises UserError."""

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sharded_param_state(
            self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
        ) -> Any:
            if is_loading:
                raise UserError(
                    f"the optimizer's state in this checkpoint is in the form {form}, which fits only the layout that "
                    f"wrote it and does not record that layout: write it in the form {_TAKEN} (in Megatron-Bridge by "
                    f"checkpoint.dist_ckpt_optim_fully_reshardable=True), or take a fresh optimizer (load_optim=False)"
                )
            raise UserError(
                f"this loop saves the distributed optimizer's state in the form {form}, which would load in another "
                f'layout without an error: give its sharded_state_dict metadata={{"distrib_optim_sharding_type": '
                f'"{_TAKEN}"}}'
            )

        return sharded_param_state

    return replaced


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
        _refusing(form),
        "the optimizer's state in a form that fits one layout would load in another without an error",
        "(self, model_sharded_state_dict, is_loading=False, metadata=None)",
    )
    for form, function in _OF_ONE_LAYOUT.items()
)
"""Applied in scripts that have their own training loop and use one of our schedules."""

BRIDGE_PATCHES = (
    Patch(
        "megatron.bridge.training.checkpointing:_build_sharded_state_dict_metadata",
        _always_reshardable,
        "checkpoints hold the optimizer's state in the form that fits every layout, in place of Bridge's default",
        "(use_distributed_optimizer, cfg)",
    ),
)
"""Applied likewise, in a process that has imported Megatron-Bridge's training loop."""
