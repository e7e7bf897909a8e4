"""`megatron-vp flags`: list only the training flags that this plug-in adds to Megatron's."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("flags", short_help="List the training flags that the plug-in adds.")(flags)


def flags() -> None:
    """List the flags that a training job accepts in addition to Megatron's own.

    The training script's `--help` lists these flags among hundreds of Megatron's flags.
    """
    from megatron_vp.mcore.platform.flags import quiet_fallback_warnings

    quiet_fallback_warnings()
    from megatron_vp.mcore.options.arguments import our_parser

    typer.echo(our_parser().format_help(), nl=False)
