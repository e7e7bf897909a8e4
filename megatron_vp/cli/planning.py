"""The shared parts of `plan` and `simulate`: options, the job, and the output."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.settings import ONE_QUEUE, flags_of, yaml_of

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.planning.ties import Tie
    from megatron_vp.cost.sizes.shapes import Job, Plan
    from megatron_vp.jobs.job_config import JobConfig

GIB = 2**30

LEAST_MEMORY, MOST_MEMORY, MOST_OF_A_HOST = 0.01, 512, 16_384
"""The smallest `--memory` in GiB, and the largest on a GPU and on a host. No GPU has more than 288 GiB; the ranks of a
CPU job share a host's memory.
"""

MOST_GPUS = 1_000_000
"""The most GPUs that a job may have, several times as many as the largest cluster has."""


class Format(StrEnum):
    """The output formats of the command."""

    TABLE = "table"
    JSON = "json"
    PNG = "png"


HardwareOption = Annotated[str, typer.Option(help="Hardware of the job: a100, h100, h200, b200, mi300x or cpu.")]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Nodes of the job (default: enough GPUs for one model replica).")
]
MemoryOption = Annotated[float | None, typer.Option(help="Memory per rank in GiB (default: all that the GPU has).")]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="Output format (default: what the file's suffix says, else a table).")
]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file instead of the screen.")]


@dataclass(frozen=True)
class Request:
    """The input of a planning command: the job, the hardware, and the bytes available per rank."""

    config: JobConfig
    job: Job
    hardware: Hardware
    limit: float

    @property
    def title(self) -> str:
        """One line that describes the job and its hardware."""
        job = self.job
        return (
            f"{job.gpus} x {self.hardware.title}: {job.pipeline} pipeline x {job.tensor} tensor x {job.context} "
            f"context x {job.data} data ranks, {job.microbatches} microbatches of {job.micro_batch} x {job.sequence} "
            f"tokens, vocabulary {job.model.vocab}" + (f", layers in fp8 ({job.fp8})" if job.fp8 else "")
        )

    @property
    def tie(self) -> Tie:
        """The largest difference at which runs of the job still count as equally fast."""
        from megatron_vp.cost.planning.ties import tie_of

        return tie_of(self.job, self.hardware)

    @property
    def shards(self) -> str:
        """One line with the rows of an even vocabulary shard and the imbalance of such shards."""
        job = self.job
        return f"vocabulary shards of {job.shard_rows} rows, {100 * job.shard_imbalance:.1f} % above the mean"

    def shards_of(self, plan: Plan) -> str:
        """One line with the vocabulary rows of a plan, and with its layers if rows are assigned."""
        if plan.vocab_rows is None:
            return self.shards
        rows = f"vocabulary rows by rank {','.join(map(str, plan.vocab_rows))}"
        if not plan.layers or self.job.model.is_hybrid:
            return rows
        return f"{rows}; layers by stage {','.join(map(str, plan.layers))}"

    def segments_of(self, plan: Plan) -> list[str]:
        """One line with the segments into which the plan cuts a hybrid model's pattern; no line for a GPT model."""
        from megatron_vp.cost.sizes.job_plan import bars_of

        text = bars_of(self.config, plan, self.job)
        return [] if text is None else [f"segments by stage: {text}"]

    @property
    def notes(self) -> list[str]:
        """Lines that say what the predictions leave out and how accurate they are."""
        lines = []
        if self.uncounted:
            lines.append(f"not counted, though it changes time or memory: {', '.join(self.uncounted)}")
        if self.assumed:
            lines.append(f"assumed, because the job does not say it: {'; '.join(self.assumed)}")
        if self.unused:
            lines.append(f"ignored, because the prediction does not depend on it: {', '.join(self.unused)}")
        return [*lines, self.caveat]

    @property
    def uncounted(self) -> list[str]:
        """Options of the job that change time or memory, but that the cost model does not know."""
        from megatron_vp.cost.sizes.job_plan import uncounted

        return uncounted(self.config)

    @property
    def assumed(self) -> list[str]:
        """Assumptions about settings that the job leaves open, but that its time depends on."""
        from megatron_vp.cost.times.assumptions import assumed

        return assumed(self.job, self.hardware)

    @property
    def unused(self) -> list[str]:
        """All other options of the job that the cost model does not read."""
        from megatron_vp.cost.sizes.job_plan import UNCOUNTED
        from megatron_vp.jobs.job_config import OTHERS, SIZES

        return self.config.unused({*SIZES, *OTHERS, *UNCOUNTED})

    @property
    def caveat(self) -> str:
        """One paragraph on the accuracy of the prediction."""
        from megatron_vp.cost.hardware.constants import ERROR_BAND

        time, memory = (f"{100 * ERROR_BAND[name]:.0f} %" for name in ("time", "memory"))
        return (
            f"Predicted, not measured. {self._vocabulary_passes} Setups of A100s that the constants were not "
            f"fitted on came out within {time} of their time and {memory} of their memory; other hardware is not "
            f"calibrated (docs/evidence/predictions.md). {self._evidence}"
        )

    @property
    def _evidence(self) -> str:
        """Published runs of this kind of job, and the errors of their predictions."""
        from megatron_vp.cost.hardware.constants import compared

        job, found = self.job, None
        if not job.model.is_hybrid:
            found = compared(self.hardware.name, fp8=job.fp8 is not None, experts=job.model.experts > 0)
        if found is None:
            return "No published run of this kind was compared with its prediction."
        return (
            f"{found.runs} published runs of this kind ({found.kind}, whole vocabulary layers) were predicted with a "
            f"mean error of {found.mean} % in time, {found.worst} % at worst; some constants were set by them."
        )

    @property
    def _vocabulary_passes(self) -> str:
        if self.hardware.rates is None:
            return (
                "S and T take what the paper's eager code took: this project's kernels were not counted for "
                f"{self.hardware.name}."
            )
        return "S and T take what this project's kernels move and compute, by count."

    def document(self) -> dict[str, Any]:
        """The request as part of a JSON document."""
        job = self.job
        return {
            "hardware": self.hardware.name,
            "gpus": job.gpus,
            "pipeline": job.pipeline,
            "tensor": job.tensor,
            "context": job.context,
            "data": job.data,
            "microbatches": job.microbatches,
            "shard_rows": job.shard_rows,
            "shard_imbalance": job.shard_imbalance,
            "fp8_recipe": job.fp8,
            "layers": job.layers,
            "limit_bytes": self.limit,
            "vocabulary_passes": "paper" if self.hardware.rates is None else "counted",
            "uncounted": self.uncounted,
            "assumed": self.assumed,
            "passed_over": self.unused,
            "note": self.caveat,
        }


def read_request(
    paths: Sequence[Path],
    flags: Sequence[str],
    hardware: str,
    nodes: int | None,
    memory: float | None,
    commands_own: Sequence[str] = (),
) -> Request:
    """Read a job from its configuration and flags; `commands_own` lists the options of the calling command.

    Raises UserError.
    """
    from megatron_vp.cost.sizes.fp8 import refuse_fp8
    from megatron_vp.cost.sizes.job_sizes import job_of

    config, machine, gpus, limit = _read(paths, flags, hardware, nodes, memory, commands_own)
    job = replace(job_of(config.values, gpus), one_queue=os.environ.get(ONE_QUEUE) == "1")
    refuse_fp8(job, machine)
    return Request(config, job, machine, limit)


def read_cluster(
    paths: Sequence[Path],
    flags: Sequence[str],
    hardware: str,
    nodes: int | None,
    memory: float | None,
    commands_own: Sequence[str] = (),
) -> tuple[JobConfig, Hardware, int, float]:
    """Read a job whose parallel sizes are open, its hardware, the number of GPUs and the bytes that each GPU may use.

    Raises UserError.
    """
    config, machine, gpus, limit = _read(paths, flags, hardware, nodes, memory, commands_own)
    if gpus is None:
        raise UserError("--search needs to know the cluster: give --nodes")
    return config, machine, gpus, limit


def _read(
    paths: Sequence[Path],
    flags: Sequence[str],
    hardware: str,
    nodes: int | None,
    memory: float | None,
    commands_own: Sequence[str],
) -> tuple[JobConfig, Hardware, int | None, float]:
    from megatron_vp.cost.hardware.gpus import find_hardware
    from megatron_vp.jobs.job_config import read_sizes

    machine = find_hardware(hardware)
    config = read_sizes(paths, flags, commands_own)
    if memory is not None:
        _refuse_memory(memory, machine)
    if nodes is not None and nodes * machine.gpus_per_node > MOST_GPUS:
        raise UserError(
            f"--nodes {nodes} mean {nodes * machine.gpus_per_node:,} GPUs, more than any cluster has: give nodes of "
            f"{machine.gpus_per_node} GPUs, at most {MOST_GPUS // machine.gpus_per_node}"
        )
    limit = machine.memory if memory is None else memory * GIB
    return config, machine, None if nodes is None else nodes * machine.gpus_per_node, limit


def _refuse_memory(memory: float, machine: Hardware) -> None:
    """Refuse an impossible amount of memory, and suggest the unit that was probably meant."""
    most = MOST_MEMORY if machine.is_gpu else MOST_OF_A_HOST
    if LEAST_MEMORY <= memory <= most:
        return
    meant = ""
    for unit, factor in (("MiB", 2**20), ("bytes", 1)):
        gib = memory * factor / GIB
        if memory > most and 1 <= gib <= most:
            meant = f"; as {unit} that is --memory {gib:.4g}"
    raise UserError(f"--memory must be {LEAST_MEMORY} to {most} GiB per rank; got {memory:.15g}{meant}")


def what_to_set(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as part of a JSON document: `overlay` always leads to this run, `flags` only if `unset` is empty."""
    unset = [option_of(name) for name, value in settings.items() if value is None or value is False]
    return {"settings": settings, "flags": flags_of(settings), "unset": unset, "overlay": yaml_of(settings)}


def how_to_run(settings: dict[str, Any], request: Request) -> list[str]:
    """Lines that show how to change the configuration for a run, as flags and as a file."""
    unset = [name for name, value in settings.items() if value is None or value is False]
    lines = ["", "use: " + (flags_of(settings) or "the configuration as it is")]
    if unset:
        lines.append(f"and without {', '.join(unset)}, which a file must unset")
    if request.hardware.is_gpu and max(request.job.tensor, request.job.context) > 1:
        lines.append(f"in an environment with {ONE_QUEUE}=1, which Megatron requires on GPUs before Blackwell")
    return [*lines, "", yaml_of(settings)]


def seconds(value: float) -> str:
    """Format seconds with four digits, including trailing zeros, so that a column is easy to compare."""
    digits = 3 - math.floor(math.log10(value)) if value else 0
    return f"{value:.{max(0, digits)}f}"


def rendered(table: Table) -> str:
    """Format a rich table as text of up to 160 columns."""
    from rich.console import Console

    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    console.print(table)
    return console.file.getvalue()
