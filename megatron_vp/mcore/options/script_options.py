"""Refuses options that Megatron leaves to the training script and that `pretrain_gpt_vp.py` does not implement."""

from __future__ import annotations

import argparse

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of

SCRIPT_OPTIONS = (
    *("fim_data", "hybrid_context_parallel", "per_dataset_sequences_path"),
    *("logits_save_dir", "logits_load_dir", "perform_rl_step", "log_straggler"),
)


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
