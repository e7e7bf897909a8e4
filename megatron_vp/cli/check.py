"""`megatron-vp check`: everything that a start would refuse, without a start."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from megatron_vp.cli.job import TAKES_A_JOB, ConfigOption, JobArgument, arguments, files_and_flags


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("check", context_settings=TAKES_A_JOB)(check)


def check(
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes of the whole job.")],
    job: JobArgument = None,
    overlays: ConfigOption = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", min=1, help="Check this node too, which shall run so many."),
    ] = None,
) -> None:
    """Check the arguments of a training job as its ranks would, without starting it.

    All other arguments are the job's own, as in training. Reads configuration, tokenizer, the datasets'
    indices and the metadata of the checkpoint to load. With --ranks-per-node also looks at this node: GPUs, network
    interface, room for checkpoints.

    \b
    megatron-vp check configs/llama3_8b.yaml --ranks 32 --vocab-parallel
    """
    from megatron_vp.mcore.start import preflight

    args = preflight.check_job(arguments(*files_and_flags(job, overlays)), ranks, here=ranks_per_node is not None)
    preflight.check_files(args)
    if ranks_per_node is not None:
        preflight.check_node(args, ranks_per_node)
        typer.echo(preflight.describe_node())
    if os.environ.get("SLURM_PROCID", "0") == "0":
        typer.echo("\n".join(preflight.describe_job(args, ranks)))
