"""Options, input and output that the commands `plan` and `simulate` share."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_vp.errors import UserError
from megatron_vp.jobs.job_config import ONE_QUEUE

if TYPE_CHECKING:
    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.layers.shapes import Job
    from megatron_vp.cost.planning.predict import Prediction
    from megatron_vp.jobs.job_config import JobConfig

GIB = 2**30

LEAST_MEMORY, MOST_MEMORY, MOST_OF_A_HOST = 0.01, 512, 16_384
"""Limits of `--memory` in GiB: the smallest value, the largest for a GPU, and the largest for a host. No GPU has more
than 288 GiB; the ranks of a CPU job share a host's memory.
"""


class Format(StrEnum):
    """The output formats of `plan` and `simulate`."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="Output format (default: the one that the -o file's suffix names, else a table)."),
]
HardwareOption = Annotated[str, typer.Option(help="Hardware of the job: a100, h100, h200, b200, mi300x or cpu.")]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Number of nodes (default: enough for one model replica).")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        parser=lambda text: float(str(text).removesuffix("GiB")),
        metavar="X|XGiB",
        help="Memory limit per rank in GiB (default: the GPU's full memory).",
    ),
]
PostTrainingOption = Annotated[
    bool,
    typer.Option(
        "--post-training",
        help="The loop trains on log-probabilities and entropies of tokens (megatron_vp.token_log_probs), for which an "
        "output layer that is not split keeps fp32 logits.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the output to this file instead of the screen.")
]


@dataclass(frozen=True)
class Request:
    """The input of a planning command: the job, the hardware, and the memory limit per rank in bytes."""

    config: JobConfig
    job: Job
    hardware: Hardware
    limit: float

    @classmethod
    def of(cls, config: JobConfig, hardware: Hardware, gpus: int | None, limit: float) -> Request:
        """The request for the job of a configuration. Raises UserError."""
        from megatron_vp.cost.layers.fp8 import refuse_fp8
        from megatron_vp.cost.layers.job_sizes import job_of

        job = replace(job_of(config, gpus), one_queue=os.environ.get(ONE_QUEUE) == "1")
        refuse_fp8(job, hardware)
        return cls(config, job, hardware, limit)

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
    def notes(self) -> list[str]:
        """Lines that state how accurate the predictions are, what they assume, and which options they leave out."""
        from megatron_vp.cost.planning.stage_costs import expected_maximum

        late = expected_maximum((1.0,), self.job.gpus, self.hardware.constants.speed_spread) - 1
        slowest = [f"the slowest of {self.job.gpus} GPUs counts as {100 * late:.1f} % slower than a typical one"]
        said = (("assumed", "; ", self.assumed), ("not counted", ", ", self.uncounted))
        notes = [f"{what}: {mark.join(found)}" for what, mark, found in said if found]
        return [self.caveat, *(slowest if late else []), *notes]

    @property
    def uncounted(self) -> list[str]:
        """The job's options that change time or memory but that the cost model does not support."""
        from megatron_vp.cost.layers.job_plan import uncounted

        return uncounted(self.config)

    @property
    def assumed(self) -> list[str]:
        """Assumptions about settings that affect time but that the job does not specify."""
        from megatron_vp.cost.layers.job_plan import assumed

        grows = self.config.get("step_batch_size_schedule") is not None
        growing = ["the last batch size of --step-batch-size-schedule"] if grows else []
        return [*assumed(self.job, self.hardware), *growing]

    @property
    def caveat(self) -> str:
        """A paragraph that states how accurate the prediction is."""
        from megatron_vp.cost.hardware.constants import ERROR_BAND, compared

        job, evidence = self.job, "No published run of this kind has been compared with a prediction."
        found = compared(self.hardware.name, fp8=job.fp8 is not None, experts=job.model.experts > 0)
        if found is not None and not job.model.is_hybrid:
            evidence = (
                f"For {found.runs} published runs of this kind ({found.kind}, without vocabulary parallelism), the "
                f"mean error of predicted tokens/s is {found.mean} % and the largest {found.worst} %; some constants "
                "were fitted to these runs."
            )
        time, memory = (f"{100 * ERROR_BAND[name]:.0f} %" for name in ("time", "memory"))
        return (
            "Predicted, not measured. On A100 setups to which the cost model was not fitted, its error was at most "
            f"{time} in time and {memory} in memory (docs/evidence/predictions.md). {evidence}"
        )

    def document(self) -> dict[str, Any]:
        """The request as part of a JSON document."""
        job = self.job
        sizes = ["gpus", "pipeline", "tensor", "context", "data", "microbatches", "shard_rows", "shard_imbalance"]
        return {
            "hardware": self.hardware.name,
            **{name: getattr(job, name) for name in sizes},
            "fp8_recipe": job.fp8,
            "layers": job.layers,
            "limit_bytes": self.limit,
            "uncounted": self.uncounted,
            "assumed": self.assumed,
            "note": self.caveat,
        }


def read_cluster(
    paths: Sequence[Path],
    flags: Sequence[str],
    hardware: str,
    nodes: int | None,
    memory: float | None,
    commands_own: Sequence[str] = (),
    *,
    post_training: bool = False,
) -> tuple[JobConfig, Hardware, int | None, float]:
    """Read a job, its hardware, the number of GPUs if `nodes` gives it, and bytes of memory per GPU.

    `commands_own` is as in `read_sizes`, `post_training` as in `PostTrainingOption`. Raises UserError.
    """
    from megatron_vp.cost.hardware.gpus import find_hardware
    from megatron_vp.jobs.job_config import read_sizes

    machine = find_hardware(hardware)
    config = read_sizes(paths, flags, commands_own)
    if post_training:
        config |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "logits"}  # See `Job.cross_entropy`.
    most = MOST_MEMORY if machine.is_gpu else MOST_OF_A_HOST
    if memory is not None and not LEAST_MEMORY <= memory <= most:
        raise UserError(f"--memory is in GiB per rank, from {LEAST_MEMORY} to {most}; got {memory:.15g}")
    gpus = None if nodes is None else nodes * machine.gpus_per_node
    return config, machine, gpus, machine.memory if memory is None else memory * GIB


def memory_used(found: Prediction, limit: float) -> str:
    """State how much memory the fullest rank needs, and whether the prediction's error may hide that it is too much."""
    from megatron_vp.cost.hardware.constants import ERROR_BAND

    fits = "fits" if found.fits(limit) else "does not fit"
    line = f"peak memory {found.peak_memory / GIB:.1f} GiB: {fits} into {limit / GIB:.4g} GiB"
    if not found.fits(limit) or not found.is_tight(limit):
        return line
    return (
        f"{line}, unless predicted memory is {100 * ERROR_BAND['memory']:.0f} % too low; to free memory, use "
        "recomputation, more nodes or other parallel sizes (megatron-vp plan --search)"
    )


def seconds(value: float) -> str:
    """Format seconds with four significant digits, including trailing zeros, so that columns align."""
    digits = 3 - math.floor(math.log10(value)) if value else 0
    return f"{value:.{max(0, digits)}f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> str:
    """Format a table as text that is at most 160 characters wide. Columns are aligned right, or left if their headings
    start with `<`.
    """
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for heading in headings:
        left = heading.startswith("<")
        made.add_column(heading[left:], justify="left" if left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    written = io.StringIO()
    Console(width=160, file=written, force_terminal=False).print(made)
    return written.getvalue()
