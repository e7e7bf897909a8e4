"""`megatron-vp simulate`: predict the time and memory of every pipeline rank of a job on given hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument, options_of
from megatron_vp.cli.planning import (
    FORMAT_HELP,
    GIB,
    HardwareOption,
    MemoryOption,
    NodesOption,
    OutputOption,
    Request,
    TableOrJson,
    memory_room,
    read_request,
    seconds,
    table,
)
from megatron_vp.cli.result_output import format_for, write
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import files_and_flags
from megatron_vp.jobs.settings import ONE_QUEUE

if TYPE_CHECKING:
    from megatron_vp.cost.layers.shapes import Job, Plan
    from megatron_vp.cost.planning.predict import Prediction
    from megatron_vp.cost.ranks.outside import OutsideMemory
    from megatron_vp.cost.ranks.rank_memory import RankMemory

MOST_FORWARDS = 131_072
"""Limit on pipeline ranks x microbatches x chunks; at this limit, a simulation takes half a minute on one core."""


def simulate(
    context: typer.Context,
    job: JobArgument = None,
    overlays: ConfigOption = None,
    hardware: HardwareOption = "h100",
    nodes: NodesOption = None,
    memory: MemoryOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Instead of the cost model's pass times, use those measured by a run with --pipeline-trace DIR.",
        ),
    ] = None,
    asked_format: Annotated[TableOrJson | None, typer.Option("--format", help=FORMAT_HELP)] = None,
    output: OutputOption = None,
) -> None:
    """Predict the time and memory of every pipeline rank of a job under the schedule that the job sets.

    CONFIG and FLAGS are the job's training arguments. FLAGS override CONFIG.

    \b
    megatron-vp simulate configs/llama3_8b.yaml --nodes 4 --vocab-parallel --pipeline-schedule v-half
    """
    from megatron_vp.cost.layers.job_plan import plan_of
    from megatron_vp.cost.planning.offloading import check_offload
    from megatron_vp.cost.planning.own_plan import own_plan, traced_costs
    from megatron_vp.cost.planning.predict import predict
    from megatron_vp.schedule.gc_paused import gc_paused
    from megatron_vp.trace.rank_files import read_traces

    output_format = format_for(asked_format, output, TableOrJson)
    request = read_request(*files_and_flags(job, overlays), hardware, nodes, memory, options_of(context))
    whole, config = request.job, request.config
    _refuse_endless(whole, plan_of(config))
    partition = None if trace is None else read_traces(trace)[0].partition
    plan = own_plan(config, whole, request.hardware, request.limit, partition)
    with gc_paused():
        measured = None if trace is None else traced_costs(trace, whole, plan)
        found = predict(whole, plan, request.hardware, measured)
        if plan.offload_chunks:
            check_offload(found)
        if output_format is TableOrJson.JSON:
            content = json.dumps(request.document() | {"plan": found.document(request.limit)}, indent=1) + "\n"
        else:
            content = _table(request, found)
        write(content, output)


def _refuse_endless(job: Job, plan: Plan) -> None:
    forwards = job.pipeline * job.microbatches * (plan.chunks or 1)
    if forwards > MOST_FORWARDS:
        raise UserError(
            f"{job.pipeline} pipeline ranks x {job.microbatches} microbatches"
            f"{f' x {plan.chunks} chunks' if plan.chunks else ''} are {forwards:,} forward passes; simulate accepts at "
            f"most {MOST_FORWARDS:,}: give a smaller --global-batch-size, or use `megatron-vp plan`, which simulates "
            "fewer microbatches and extrapolates"
        )


def _table(request: Request, found: Prediction) -> str:
    from megatron_vp.cost.layers.job_plan import bars_of
    from megatron_vp.schedule import VocabMethod

    makespan, peak = found.iteration_seconds - found.step, request.hardware.peak_flops
    memory = table(
        ["rank", "busy s", "idle %", "GiB", *found.memory[0].parts()],
        (
            [str(rank), seconds(busy), f"{100 * (1 - busy / makespan):.1f}", *_sizes(held, 1)]
            for rank, (busy, held) in enumerate(zip(found.busy, found.memory, strict=True))
        ),
        "memory in GiB by kind of data",
    )
    outside = table(
        ["rank", "communicators", "outside", *found.memory[0].outside.parts()],
        (
            [str(rank), str(held.outside.communicators), *_sizes(held.outside, 2)]
            for rank, held in enumerate(found.memory)
        ),
        "number of communicators that this project adds, and estimated memory in GiB outside PyTorch's allocator",
    )
    bars, plan, part = bars_of(request.config, found.plan, request.job), found.plan, found.seconds
    fits = "fits" if found.fits(request.limit) else "does not fit"
    return "\n".join(
        [
            request.title,
            f"schedule {plan.schedule}{f' ({plan.shape})' if plan.shape else ''}, vocabulary {found.candidate.method}"
            + (f"; {request.shards_of(plan)}" if plan.vocab is not VocabMethod.NONE else ""),
            *([] if bars is None else [f"segments by stage: {bars}"]),
            request.job.layers.line,
            "",
            f"{seconds(found.iteration_seconds)} s per iteration, {found.tokens_per_second:,.0f} tokens/s, "
            f"{found.mfu * peak / 1e12:.0f} TFLOP/s per GPU (by Megatron's formula), "
            f"MFU {100 * found.mfu:.1f} % of {peak / 1e12:.0f} TFLOP/s, bubble {100 * found.bubble_fraction:.1f} %",
            f"iteration time: mean work per rank {seconds(part['work'])} s, "
            f"excess work of the busiest rank {part['imbalance']:.3g} s, bubble {part['bubble']:.3g} s, "
            f"communication {part['communication']:.3g} s, gradient synchronisation and optimizer {found.step:.3g} s"
            + (f", copies to the host and back {part['copies']:.3g} s" if found.copies else ""),
            f"peak memory {found.peak_memory / GIB:.1f} GiB: {fits} into {request.limit / GIB:.4g} GiB; the run is "
            f"bound by {found.bound_by(request.limit)}",
            *memory_room(request, found),
            "",
            memory + outside + _copies(request, found) + "\n".join(request.notes),
            "",
        ]
    )


def _sizes(memory: RankMemory | OutsideMemory, digits: int) -> list[str]:
    """The total and the parts of `memory` in GiB."""
    return [f"{size / GIB:.{digits}f}" for size in (memory.total, *memory.parts().values())]


def _copies(request: Request, found: Prediction) -> str:
    from megatron_vp.cost.planning.offloading import fullest_node, host_room
    from megatron_vp.cost.planning.predict import has_one_queue

    if not found.copies:
        return ""
    shown = table(
        [
            *("rank", "chunks", "host GiB", "GiB per microbatch", "lane busy %"),
            *("copy-out wait s", "copy-back wait s", "queue wait s"),
        ],
        (
            [
                str(rank),
                ",".join(map(str, each.chunks)) or "-",
                f"{each.host / GIB:.2f}",
                f"{each.bytes / GIB:.3f}",
                f"{100 * each.load:.0f}",
                *(f"{wait:.3g}" for wait in (each.wait_out, each.wait_back, each.wait_in_queue)),
            ]
            for rank, each in enumerate(found.copies)
        ),
        "activations in host memory (predicted; never measured on a GPU)",
    )
    taken = fullest_node(request.job, request.hardware, [each.host for each in found.copies])
    lines = [
        f"host memory for offloaded activations on the fullest node: {taken / GIB:.0f} of "
        f"{host_room(request.hardware) / GIB:.0f} GiB"
    ]
    if min(len(each.chunks) for each in found.copies) < found.plan.offload_chunks:
        lines.append(
            "the activations of some chunks stay on the device, because the backward passes of these chunks start "
            "before a copy to the host would finish"
        )
    load, slowest = max((each.load, rank) for rank, each in enumerate(found.copies))
    if load > 1:
        lines.append(
            f"copies set the pace: on rank {slowest}, they take {load:.2f} times as long as the passes; fewer "
            "offloaded chunks shorten the iteration"
        )
    if has_one_queue(request.job, request.hardware):
        lines.append(
            f"with one hardware queue ({ONE_QUEUE}=1), a copy that waits for an earlier copy also delays the passes "
            "queued after it (queue wait s)"
        )
    return shown + "\n".join(lines) + "\n"
