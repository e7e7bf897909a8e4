"""`megatron-vp env`: list the software that a run would use; `megatron-vp flags`: list the flags that we add."""

from __future__ import annotations

import typer


def env() -> None:
    """List the software that a run would use on this machine, and the effect of each missing component.

    Run this command where the job will run: under srun or in an interactive allocation, not on a login node.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megatron_vp.mcore.platform.environment import parts
    from megatron_vp.mcore.platform.installed import INSTALL_ENGINE, here

    table = Table("part", "found here", "effect of its absence", box=None, pad_edge=False)
    for row in parts():
        table.add_row(*map(escape, row))
    Console().print(table)
    if here().engine is None:
        print(
            f"\nTo build Transformer Engine against the installed PyTorch (with core_cu12 for CUDA 12):\n"
            f"  pip install ninja pybind11 setuptools wheel && {INSTALL_ENGINE}"
        )


def flags() -> None:
    """List the flags that a training job accepts in addition to Megatron's own.

    The training script's `--help` lists these flags among hundreds of Megatron's flags.
    """
    from megatron_vp.mcore.platform.flags import quiet_fallback_warnings

    quiet_fallback_warnings()
    from megatron_vp.mcore.options.arguments import our_parser

    typer.echo(our_parser().format_help(), nl=False)
