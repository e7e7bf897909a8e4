"""`megatron-vp sbatch`: run the start-up checks of a training job, then submit it to SLURM."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import arguments, asks_for_cpu, spelled
from megatron_vp.jobs.known_options import files_and_flags
from megatron_vp.jobs.shipped import BATCH_FILES

IN_THE_REPOSITORY = Path("scripts/slurm")
"""The folder in which the batch files look for their helper files by default."""


def sbatch(
    job: JobArgument = None,
    overlays: ConfigOption = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--script", metavar="FILE", help="Train with your own Megatron script instead of pretrain_gpt_vp.py."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Number of nodes (default: enough for one model replica).")
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, help="GPUs per node; each runs one rank.")
    ] = 8,
    ntasks_per_node: Annotated[
        int | None, typer.Option("--ntasks-per-node", min=1, help="Ranks per node, for nodes without GPUs.")
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(
            "--node-software",
            metavar="te=VERSION|no,apex=yes|no,...",
            help="Describe the packages and GPUs of the nodes if they differ from this machine, as for --nodes of "
            "`megatron-vp check`.",
        ),
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm", metavar="OPTION=VALUE", help="Option of SLURM's sbatch, such as partition=long; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the job and print the sbatch command without running it.")
    ] = False,
) -> None:
    """Check a job, then submit it to SLURM with one rank per GPU; SLURM requeues the job until it has finished.

    Run this command in a folder that all nodes can access; logs go to runs/slurm in that folder. CONFIG and FLAGS
    are the job's training arguments. The ranks run this Python, or that of MEGATRON_VP_PYTHON; if
    MEGATRON_VP_CONTAINER_IMAGE is set, they run in that image.

    \b
    megatron-vp sbatch configs/llama3_8b.yaml --nodes 4 --vocab-parallel --slurm partition=long --dry-run
    megatron-vp sbatch --script my_pretrain.py --nodes 4 --vocab-parallel [flags of the script]
    """
    from megatron_vp.jobs.job_config import parallel_sizes, read_job_config
    from megatron_vp.mcore.platform.flags import uses_cpu
    from megatron_vp.mcore.platform.pretend_gpu import ENGINE
    from megatron_vp.mcore.replay.rehearsed import rehearse
    from megatron_vp.mcore.start.preflight import check_job, describe_job

    files, flags = files_and_flags(job, overlays)
    own = script is not None
    if not files and not own:
        raise UserError(
            "the job has no configuration file: give CONFIG first, as in `megatron-vp sbatch configs/llama3_8b.yaml`, "
            "or give --script FILE"
        )
    if script is not None and not Path(script).is_file():
        raise UserError(
            f"--script {script} is not a file: give the path of a Megatron training script, or leave --script out"
        )
    per_node = gpus_per_node if ntasks_per_node is None else ntasks_per_node
    words = arguments(files, flags)
    blind = software is None and uses_cpu(words) and not asks_for_cpu(words)
    assumed = (
        "this machine has no GPU, so the check assumed what the nodes have: describe them by --node-software, such as "
        f"te={ENGINE},apex=no"
    )
    try:
        nodes = nodes or max(1, math.ceil(math.prod(parallel_sizes(read_job_config(files, flags))) / per_node))
        ranks = nodes * per_node
        check = partial(check_job, words, ranks, nodes=software, own_script=own)
        check_start = partial(check, rehearse=partial(rehearse, own_script=own))
        checked = check() if dry_run else check_start()
    except UserError as error:
        of_slurm = "unrecognized arguments" in str(error) and "pass options of SLURM's sbatch on with --slurm"
        raise UserError("; ".join(filter(None, (str(error), of_slurm, blind and assumed)))) from error
    resources = f"--gpus-per-node={per_node}" if ntasks_per_node is None else f"--ntasks-per-node={per_node}"
    command = [
        *("sbatch", f"--nodes={nodes}", resources),
        f"--job-name={files[0].stem if script is None else Path(script).stem}",
        *(f"--export={_variables()}", *(f"--{option.lstrip('-')}" for option in slurm or () if option)),
        str(batch_files() / "pretrain.sbatch"),
    ]
    command += [] if script is None else ["--script", script]
    command += [*(spelled(file) for file in files[:1]), *arguments(files[1:], flags)]
    if blind:
        typer.echo(assumed)
    typer.echo(f"{nodes} node{'s' * (nodes != 1)} x {per_node} ranks; " + "\n".join(describe_job(checked, ranks)))
    typer.echo(shlex.join(command))
    if dry_run:
        # Only warn about missing input files, because this machine may not be the one that submits the job.
        try:
            check_start()
        except UserError as error:
            typer.echo(f"the job would not start on this machine: {error}", err=True)
        return
    if shutil.which("sbatch") is None:
        raise UserError("sbatch was not found: run this command on a machine that submits SLURM jobs, or add --dry-run")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            " ".join(done.stderr.split()) or f"sbatch exited with status {done.returncode} without a message"
        )
    typer.echo(done.stdout.strip())


def batch_files() -> Path:
    """The folder of the batch files: relative if this is the repository, otherwise that of the installation."""
    repository = IN_THE_REPOSITORY.is_dir() and IN_THE_REPOSITORY.samefile(BATCH_FILES)
    return IN_THE_REPOSITORY if repository else BATCH_FILES


def _variables() -> str:
    """The variables that SLURM passes to the job: those of this process, and those that launch.sh needs."""
    chosen = os.environ.keys() & {"MEGATRON_VP_PYTHON", "MEGATRON_VP_CONTAINER_IMAGE"}
    python = [] if chosen else [f"MEGATRON_VP_PYTHON={sys.executable}"]
    place = [f"MEGATRON_VP_SLURM={BATCH_FILES}"] if batch_files() == BATCH_FILES else []
    return ",".join(["ALL", *python, *place])
