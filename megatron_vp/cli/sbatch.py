"""`megatron-vp sbatch`: submit a training job to SLURM, after checking it as its ranks would."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_vp.cli.job import TAKES_A_JOB, ConfigOption, JobArgument
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import arguments, files_and_flags, spelled

BATCH_SCRIPT = Path("scripts/slurm/pretrain.sbatch")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("sbatch", context_settings=TAKES_A_JOB, short_help="Check a job and submit it to SLURM.")(sbatch)


def sbatch(
    job: JobArgument = None,
    overlays: ConfigOption = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes of the job (default: enough for one model replica).")
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, help="GPUs per node; each runs one rank.")
    ] = 8,
    ntasks_per_node: Annotated[
        int | None, typer.Option("--ntasks-per-node", min=1, help="Ranks per node, for nodes without GPUs.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="OPTION=VALUE", help="An option for sbatch itself, such as partition=long."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the job and print what would be submitted.")
    ] = False,
) -> None:
    """Check a job here, then submit it to SLURM with one rank per GPU, requeued until it has finished.

    Run it in the repository. All other arguments are the job's own, as in training.

    \b
    megatron-vp sbatch configs/llama3_8b.yaml --nodes 4 --vocab-parallel --slurm partition=long --dry-run
    """
    from megatron_vp.mcore.start.preflight import check_files, check_job, describe_job, ranks_of_one_replica

    files, flags = files_and_flags(job, overlays)
    if not all(option.strip("-") for option in slurm or ()):
        raise UserError("--slurm names no option of sbatch: give one, such as --slurm partition=long")
    if not files:
        raise UserError("the job has no configuration file: give CONFIG first, as in `sbatch configs/llama3_8b.yaml`")
    if not BATCH_SCRIPT.is_file():
        raise UserError(f"{BATCH_SCRIPT} is not here: run this in the megatron_vp repository")
    per_node = gpus_per_node if ntasks_per_node is None else ntasks_per_node
    if nodes is None:
        nodes = math.ceil(ranks_of_one_replica(arguments(files, flags)) / per_node)
    ranks = nodes * per_node
    checked = check_job(arguments(files, flags), ranks)
    resources = f"--gpus-per-node={per_node}" if ntasks_per_node is None else f"--ntasks-per-node={per_node}"
    # The job runs with the Python that checked it. A comma would end a variable in sbatch's list.
    python, export = f"MEGATRON_VP_PYTHON={sys.executable}", "--export=ALL"
    before = ["env", python] if "," in python else []
    export += "" if before else f",{python}"
    command = [*before, "sbatch", f"--nodes={nodes}", resources, f"--job-name={files[0].stem}", export]
    command += [f"--{option.lstrip('-')}" for option in slurm or ()]
    command += [str(BATCH_SCRIPT), spelled(files[0]), *arguments(files[1:], flags)]
    if not dry_run:
        check_files(checked.args)
    typer.echo(f"{nodes} nodes x {per_node}; " + "\n".join(describe_job(checked, ranks)))
    typer.echo(shlex.join(command))
    if dry_run:
        # The inputs may be elsewhere than the person who asks.
        try:
            check_files(checked.args)
        except UserError as error:
            typer.echo(f"would be refused on this machine: {error}", err=True)
        return
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not found: run this where jobs are submitted, or add --dry-run")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(" ".join(done.stderr.split()) or f"sbatch ended with status {done.returncode} and said nothing")
    typer.echo(done.stdout.strip())
