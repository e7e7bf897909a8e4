"""Lets a run load optimizer state that was saved with different learning rates.

Megatron looks up a checkpoint's parameter groups by their settings, which include learning rates. The options
`--override-opt-param-scheduler` and `--use-checkpoint-opt-param-scheduler`, which say which rates to use, take effect
only after this lookup, so Megatron fails to find the groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_vp.mcore.settled import current

RATES = ("max_lr", "min_lr")

Group = dict[str, Any]


def with_the_same_rates(groups: Sequence[Group], loaded: Sequence[Group], keeps_loaded: bool) -> None:
    """Give the loaded parameter groups and the optimizer's own groups the same rates, so that Megatron can match them.

    With `keeps_loaded`, both get the rates of the checkpoint; otherwise, both get the rates of this run. Groups that
    differ only in their rates, as with MuP, are paired in the order of their rates.
    """
    for here, there in zip(sorted(groups, key=_kind_and_rates), sorted(loaded, key=_kind_and_rates), strict=False):
        source, target = (there, here) if keeps_loaded else (here, there)
        target.update({name: source[name] for name in RATES if name in source})


def _kind_and_rates(group: Group) -> tuple[str, list[float]]:
    lasting = [group.get(name) for name in param_group_identifier_keys if name not in RATES]
    return repr(lasting), [group.get(name) or 0.0 for name in RATES]


def _under_other_rates(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        args = current().arguments
        if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
            states = (
                [state_dict] if len(self.chained_optimizers) == 1 else [state_dict[key] for key in sorted(state_dict)]
            )
            for optimizer, state in zip(self.chained_optimizers, states, strict=True):
                if not optimizer.is_stub_optimizer:
                    loaded = state.get("optimizer", state)["param_groups"]
                    with_the_same_rates(optimizer.param_groups, loaded, args.use_checkpoint_opt_param_scheduler)
        original(self, state_dict)

    return load_state_dict
