"""Refuses options that Megatron leaves to the training script and that `pretrain_gpt_vp.py` does not implement."""

from __future__ import annotations

from megatron_vp.errors import Refused, UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.jobs.options import OPTIONS
from megatron_vp.mcore.options.refusals import values_of

_DATA = ("mock_data", "data_path", "data_args_path", "train_data_path", "per_split_data_args_path")


def refuse_script_options(args: Arguments) -> None:
    """Raise a UserError that names all options in `args` that `pretrain_gpt_vp.py` does not implement."""
    values = values_of(args)
    asked = [(option, option.found(values)) for option in OPTIONS if option.run == "our script"]
    if any(called for _, called in asked):
        raise Refused([option.message(called, "") for option, called in asked if called])


def refuse_no_data(args: Arguments) -> None:
    """Raise UserError if no argument names the data of `pretrain_gpt_vp.py`."""
    if not any(getattr(args, name) for name in _DATA):
        raise UserError(
            "the job has no data: add --data-path PREFIX (`megatron-vp data` writes a dataset), or --mock-data to "
            "train on random tokens"
        )
