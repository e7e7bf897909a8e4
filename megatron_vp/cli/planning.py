"""Options, input and output that the commands `plan` and `simulate` share."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.settings import ONE_QUEUE, flags_of, yaml_of

if TYPE_CHECKING:
    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.layers.shapes import Job, Plan
    from megatron_vp.cost.planning.choice import Choice, Tie
    from megatron_vp.cost.planning.predict import Prediction
    from megatron_vp.jobs.job_config import JobConfig

GIB = 2**30

LEAST_MEMORY, MOST_MEMORY, MOST_OF_A_HOST = 0.01, 512, 16_384
"""Limits of `--memory` in GiB: the smallest value, the largest for a GPU, and the largest for a host. No GPU has more
than 288 GiB; the ranks of a CPU job share a host's memory.
"""

MOST_GPUS = 1_000_000
"""The largest accepted number of GPUs, several times as many as in the largest existing cluster."""


class TableOrJson(StrEnum):
    """The output formats of `simulate`."""

    TABLE = "table"
    JSON = "json"


class Format(StrEnum):
    """The output formats of `plan`."""

    TABLE = "table"
    JSON = "json"
    PNG = "png"


FORMAT_HELP = "Output format (default: the one that the -o file's suffix names, else a table)."

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

        job = replace(job_of(config.values, gpus), one_queue=os.environ.get(ONE_QUEUE) == "1")
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
    def tie(self) -> Tie:
        """The largest relative difference in time at which two runs of the job count as equally fast."""
        from megatron_vp.cost.planning.choice import tie_of

        return tie_of(self.job, self.hardware)

    @property
    def shards(self) -> str:
        """One line that states the size of the largest shard in an even split, and its excess over the mean size."""
        job = self.job
        return f"largest vocabulary shard: {job.shard_rows} rows, {100 * job.shard_imbalance:.1f} % above the mean"

    def shards_of(self, plan: Plan) -> str:
        """One line with the rows of each rank and the layers of each stage, or `shards` if the plan has even shards."""
        if plan.vocab_rows is None:
            return self.shards
        rows = f"vocabulary rows by rank: {','.join(map(str, plan.vocab_rows))}"
        if not plan.layers or self.job.model.is_hybrid:
            return rows
        return f"{rows}; layers by stage: {','.join(map(str, plan.layers))}"

    @property
    def notes(self) -> list[str]:
        """Lines that state what the predictions leave out, what they assume, and how accurate they are."""
        said = (
            ("options that change time or memory but are not counted in the prediction", ", ", self.uncounted),
            ("assumptions about what the job does not specify", "; ", self.assumed),
        )
        return [f"{what}: {mark.join(found)}" for what, mark, found in said if found] + [self.caveat]

    @property
    def uncounted(self) -> list[str]:
        """The job's options that change time or memory but that the cost model does not support."""
        from megatron_vp.cost.layers.job_plan import uncounted

        return uncounted(self.config)

    @property
    def assumed(self) -> list[str]:
        """Assumptions about settings that affect time but that the job does not specify."""
        from megatron_vp.cost.layers.job_plan import assumed

        grows = self.config.values.get("step_batch_size_schedule") is not None
        growing = ["the last batch size of --step-batch-size-schedule"] if grows else []
        return [*assumed(self.job, self.hardware), *growing]

    @property
    def caveat(self) -> str:
        """One paragraph that states how accurate the prediction is and why."""
        from megatron_vp.cost.hardware.constants import ERROR_BAND, compared

        job, found = self.job, None
        if not job.model.is_hybrid:
            found = compared(self.hardware.name, fp8=job.fp8 is not None, experts=job.model.experts > 0)
        evidence = "No published run of this kind has been compared with a prediction."
        if found is not None:
            evidence = (
                f"For {found.runs} published runs of this kind ({found.kind}, without vocabulary parallelism), the "
                f"mean error of predicted tokens/s is {found.mean} % and the largest {found.worst} %; some constants "
                "were fitted to these runs."
            )
        passes = "are estimated from the bytes and operations of this project's kernels"
        if self.hardware.rates is None:
            passes = (
                "assume the paper's eager code, because there is no estimate of how fast this project's kernels run on "
                f"{self.hardware.name}"
            )
        time, memory = (f"{100 * ERROR_BAND[name]:.0f} %" for name in ("time", "memory"))
        return (
            f"Predicted, not measured. The times of the vocabulary passes S and T {passes}. On A100 setups to which "
            f"the cost model was not fitted, its error was at most {time} in time and {memory} in memory; these limits "
            f"do not apply to other hardware (docs/evidence/predictions.md). {evidence}"
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
            "vocabulary_passes": "paper" if self.hardware.rates is None else "counted",
            "uncounted": self.uncounted,
            "assumed": self.assumed,
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
    """Read a job from its configuration and flags; `commands_own` is as in `read_sizes`. Raises UserError."""
    return Request.of(*read_cluster(paths, flags, hardware, nodes, memory, commands_own))


def read_cluster(
    paths: Sequence[Path],
    flags: Sequence[str],
    hardware: str,
    nodes: int | None,
    memory: float | None,
    commands_own: Sequence[str] = (),
) -> tuple[JobConfig, Hardware, int | None, float]:
    """Read a job, its hardware, the number of GPUs if `nodes` gives it, and bytes of memory per GPU."""
    from megatron_vp.cost.hardware.gpus import find_hardware
    from megatron_vp.jobs.job_config import read_sizes

    machine = find_hardware(hardware)
    config = read_sizes(paths, flags, commands_own)
    most = MOST_MEMORY if machine.is_gpu else MOST_OF_A_HOST
    if memory is not None and not LEAST_MEMORY <= memory <= most:
        raise UserError(f"--memory is in GiB per rank, from {LEAST_MEMORY} to {most}; got {memory:.15g}")
    gpus = None if nodes is None else nodes * machine.gpus_per_node
    if gpus is not None and gpus > MOST_GPUS:
        raise UserError(f"--nodes {nodes} is too large: give at most {MOST_GPUS // machine.gpus_per_node}")
    return config, machine, gpus, machine.memory if memory is None else memory * GIB


def memory_room(
    request: Request, found: Prediction, others: Sequence[Prediction] = (), searched: bool = False
) -> list[str]:
    """Lines that state a run's free memory and, if this memory is less than the prediction's error, how to free more.

    The list is empty if the run does not fit in memory.

    `others`: other runs of the same job. `searched`: whether other parallel sizes have already been tried.
    """
    from megatron_vp.cost.hardware.constants import ERROR_BAND

    limit, job = request.limit, request.job
    if not found.fits(limit):
        return []
    line = (
        f"memory of the fullest rank: {found.peak_memory / GIB:.1f} of {limit / GIB:.4g} GiB, "
        f"{(limit - found.peak_memory) / GIB:.1f} GiB free"
    )
    if not found.is_tight(limit):
        return [line]
    ways = ["a run in the table above that needs less memory"] if others or searched else []
    if job.recompute.value == "none":
        ways.append("recomputation (--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)")
    ways.append(f"more nodes (--nodes){'' if job.distributed_optimizer else ' with --use-distributed-optimizer'}")
    ways += [] if searched else ["different parallel sizes (megatron-vp plan --search)"]
    return [
        f"{line}; predicted memory may be {100 * ERROR_BAND['memory']:.0f} % too low, so the run may not fit",
        f"to free memory: {'; '.join(ways)}",
    ]


def gains(choice: Choice, name: Callable[[Prediction], str] = lambda each: each.candidate.name) -> list[str]:
    """Lines that state the gain over the best run without vocabulary parallelism, and over Megatron's own best run."""
    from megatron_vp.cost.planning.choice import gain_over

    def gain(other: Prediction, what: str) -> str:
        return f"{gain_over(other, choice.chosen):.2f} times as fast as the best run {what} ({name(other)})"

    chosen, without_split, in_megatron = choice.chosen.candidate, choice.without_split, choice.in_megatron
    if without_split is None:
        return ["no run without vocabulary parallelism fits in memory"]
    if chosen.in_megatron:
        return []
    split = "that fits in memory and does not use vocabulary parallelism"
    lines = [] if chosen.without_split else [gain(without_split, split)]
    if in_megatron is None:
        return [*lines, "Megatron itself supports none of the runs that fit in memory"]
    if lines and in_megatron is without_split:
        return [f"{lines[0]}; Megatron itself supports this run"]
    return [*lines, gain(in_megatron, "that Megatron itself supports and that fits in memory")]


def what_to_set(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, for a JSON document. `overlay` always reproduces this run, but `flags` reproduces it only
    if `unset` is empty.
    """
    unset = [option_of(name) for name, value in settings.items() if value is None or value is False]
    return {"settings": settings, "flags": flags_of(settings), "unset": unset, "overlay": yaml_of(settings)}


def how_to_run(settings: dict[str, Any], request: Request, choice: Choice) -> list[str]:
    """Lines that show how to configure the chosen run: the flags to add, and an overlay file with the same settings."""
    unset = [name for name, value in settings.items() if value is None or value is False]
    slower = not choice.chosen.candidate.without_split and choice.gain is not None and choice.gain < 1
    use = "no gain in time; to run with this memory, use: " if slower else "use: "
    lines = ["", use + (flags_of(settings) or "the configuration without changes")]
    if unset:
        lines.append(f"and unset {', '.join(unset)} with a configuration file, such as the one below")
    if request.hardware.is_gpu and max(request.job.tensor, request.job.context) > 1:
        lines.append(
            f"and set the environment variable {ONE_QUEUE}=1, which Megatron requires on GPUs before Blackwell"
        )
    lines.append("Megatron has not checked these settings: run megatron-vp check with them before you train")
    return [*lines, "", yaml_of(settings)]


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
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    console.print(made)
    return console.file.getvalue()
