"""`megatron-vp run` and `replay`: run a Megatron script with the plug-in, or one rank of a large job alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument
from megatron_vp.cli.result_output import check_destination, write
from megatron_vp.jobs.known_options import files_and_flags
from megatron_vp.jobs.shipped import TRAINING_SCRIPT

if TYPE_CHECKING:
    from megatron_vp.mcore.replay.one_rank import Replayed


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


def replay(
    rank: Annotated[int, typer.Option("--rank", help="Global rank to run.")],
    job: JobArgument = None,
    overlays: ConfigOption = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Number of ranks in the job (default: enough for one model replica).")
    ] = None,
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Iterations to time, after one warm-up iteration.")
    ] = 3,
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="Run on fake tensors, without a GPU, and count only memory.")
    ] = False,
    script: Annotated[str, typer.Option("--script", help="The training script.", show_default="megatron_vp's")] = str(
        TRAINING_SCRIPT
    ),
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the results as JSON to this file.")
    ] = None,
) -> None:
    """Run one rank of a job alone: its real model chunks under its real schedule, on random inputs.

    Prints the time of each kind of pass and the rank's memory. One GPU is enough, however many ranks the job has. With
    --shapes-only, the command needs no GPU and reports only memory. CONFIG and FLAGS are training arguments.

    \b
    megatron-vp replay configs/gpt_21b.yaml --rank 31 --vocab-parallel --pipeline-schedule 1f1b
    """
    from megatron_vp.mcore.replay.one_rank import run_alone

    check_destination(False, output)
    files, flags = files_and_flags(job, overlays)
    found = run_alone(script, files, rank, ranks, iterations, flags, shapes_only)
    typer.echo(_table(found))
    if output is not None:
        write(json.dumps(asdict(found), indent=1) + "\n", output)


def _table(found: Replayed) -> str:
    place = (
        f"pipeline rank {found.pipeline_rank} of {found.pipeline_size}, run alone, with {found.microbatches} "
        "microbatches"
    )
    if found.played is not None and found.played < found.microbatches:
        place += f" ({found.played} simulated; the others need no additional memory)"
    memory = [f"{name:>12}  {value / 2**30:15.3f}  GiB" for name, value in found.memory_bytes.items()]
    if found.iteration_milliseconds is None:
        note = "memory of tensors only, without allocator fragmentation, workspaces or communicators"
        return "\n".join([place, *memory, note, found.layers.line])
    on_a_device = "peak" in found.memory_bytes
    lines = [
        place,
        f"{'pass':>12}  ms per microbatch",
        *(f"{kind:>12}  {value:15.3f}" for kind, value in found.pass_milliseconds.items()),
        f"{'iteration':>12}  {found.iteration_milliseconds:15.3f}  ms in total, without waiting for other ranks",
        *memory,
    ]
    if not on_a_device:
        lines.append("activations and buffers: not measured without a GPU; --shapes-only counts their bytes")
    if not any("|" in kind for kind in found.pass_milliseconds):  # Then F and B have not all run alone.
        lines.append(f"to simulate with these times: megatron-vp schedule ... --cost {found.costs()}")
    return "\n".join(lines)
