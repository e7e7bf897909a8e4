"""`megatron-vp run`: run your own Megatron script with the plug-in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import typer


def run(
    context: typer.Context,
    script: str = typer.Argument(help="Your Megatron training script, unchanged."),
) -> Callable[[], None]:
    """Run a Megatron training script with the plug-in.

    All arguments after SCRIPT go to the script. These arguments may include the plug-in's own flags
    (--vocab-parallel, --config FILE, --cpu). Start one process per rank with a launcher:

    \b
    torchrun --nproc-per-node 4 --no-python \\
        megatron-vp run pretrain_gpt.py --vocab-parallel ...
    """
    from megatron_vp.mcore.start.launch import run_script

    # The script runs after typer has returned, because typer would hide some of the script's exceptions.
    return partial(run_script, script, context.args)
