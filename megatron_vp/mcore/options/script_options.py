"""Refuses options that Megatron leaves to the training script and that `pretrain_gpt_vp.py` does not implement."""

from __future__ import annotations

import argparse

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of

SCRIPT_OPTIONS = (
    *("fim_data", "hybrid_context_parallel", "per_dataset_sequences_path"),
    *("logits_save_dir", "logits_load_dir", "perform_rl_step", "log_straggler"),
)

_DATA = ("mock_data", "data_path", "data_args_path", "train_data_path", "per_split_data_args_path")


def refuse_script_options(args: argparse.Namespace) -> None:
    """Raise one UserError that names all options in `args` that `pretrain_gpt_vp.py` does not implement."""
    asked = [option_of(name) for name in SCRIPT_OPTIONS if getattr(args, name)]
    if args.dataloader_type == "external":
        asked.append("--dataloader-type external")
    if asked:
        raise UserError(
            f"pretrain_gpt_vp.py does not implement {', '.join(asked)}: use a training script that does, such as "
            "NVIDIA's pretrain_gpt.py, with `megatron-vp run pretrain_gpt.py ...`"
        )


def refuse_no_data(args: argparse.Namespace) -> None:
    """Raise UserError if no argument names the data of `pretrain_gpt_vp.py`."""
    if not any(getattr(args, name) for name in _DATA):
        raise UserError(
            "the job has no data: add --data-path PREFIX (`megatron-vp data` writes a dataset), or --mock-data to "
            "train on random tokens"
        )
