"""`megatron-vp check`: check whether a job would start, without starting it."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Annotated, Literal

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument
from megatron_vp.jobs.command_line import arguments, option_of
from megatron_vp.jobs.known_options import files_and_flags


def check(
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks (processes) in the whole job.")],
    job: JobArgument = None,
    overlays: ConfigOption = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", min=1, help="Also check whether this machine can run this many ranks."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="te=VERSION|no,apex=yes|no,cc=X.Y",
            help="Describe the job's nodes if they differ from this machine: Transformer Engine, Apex and the GPU's "
            "compute capability. In other commands, --nodes is the number of nodes.",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--script",
            help="Check a job that `megatron-vp run SCRIPT` would start. Options that only SCRIPT knows are not "
            "checked.",
        ),
    ] = None,
    iteration: Annotated[
        bool,
        typer.Option(
            "--iteration", help="Also run an iteration of both ranks on fake tensors, as `replay --shapes-only` does."
        ),
    ] = False,
    output: Annotated[
        Literal["text", "json"],
        typer.Option(
            "--format",
            help="json lists the Megatron flags that the plug-in would add, and states which library would compute "
            "the layers, the norms, the softmax, the gradient accumulation and the optimizer step.",
        ),
    ] = "text",
) -> None:
    """Rehearse the start of a training job in one process, without connecting to anything.

    CONFIG and FLAGS are the job's training arguments. The command runs what rank 0 and the last rank run until their
    first iteration: it builds the tokenizer, the loggers, the model and the optimizer on fake tensors, opens the
    datasets, and reads the metadata of the checkpoint to load. It leaves nothing behind. With --ranks-per-node it also
    checks the GPUs of this machine.

    On a login node, describe the job's nodes with --nodes.

    \b
    megatron-vp check configs/llama3_8b.yaml --ranks 32 --vocab-parallel
    megatron-vp check configs/llama3_8b.yaml --ranks 32 --vocab-parallel --nodes "te=2.17.1,apex=no"
    """
    from megatron_vp.mcore.replay.one_rank import run_iteration
    from megatron_vp.mcore.replay.rehearsed import rehearse
    from megatron_vp.mcore.start import preflight

    here, own_script = ranks_per_node is not None, script is not None
    start = partial(rehearse, own_script=own_script)
    with preflight.without_compilers():
        words = arguments(*files_and_flags(job, overlays))
        checked = preflight.check_job(words, ranks, here=here, nodes=nodes, own_script=own_script, rehearse=start)
    not_run = run_iteration(checked, words) if iteration and script is None else []
    if ranks_per_node is not None:
        preflight.check_node(checked.args, ranks_per_node)
        if output == "text":
            typer.echo(preflight.describe_node())
    if output == "json":
        typer.echo(json.dumps({"flags": list(checked.words.platform_flags), "parts": dict(checked.parts)}))
    elif os.environ.get("SLURM_PROCID", "0") == "0":
        lines = preflight.describe_job(checked, ranks) + not_run
        if script is not None and (own := preflight.own_options(words)):
            lines.append(f"options not checked, because only {script} knows them: {', '.join(map(option_of, own))}")
        typer.echo(f"ok: {'\n'.join(lines)}")
