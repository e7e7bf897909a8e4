"""`megatron-vp simulate`: predict the time and memory of every pipeline rank of a job on given hardware."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument, options_of
from megatron_vp.cli.planning import (
    GIB,
    Format,
    FormatOption,
    HardwareOption,
    MemoryOption,
    NodesOption,
    OutputOption,
    PostTrainingOption,
    Request,
    memory_used,
    read_cluster,
    seconds,
    table,
)
from megatron_vp.cli.result_output import format_for, write
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import files_and_flags
from megatron_vp.jobs.vocab_shards import STAYS_WHOLE
from megatron_vp.schedule import VocabMethod

if TYPE_CHECKING:
    from megatron_vp.cost.layers.shapes import Job, Plan
    from megatron_vp.cost.planning.predict import Prediction

MOST_FORWARDS = 131_072
"""Limit on pipeline ranks x microbatches x chunks; at this limit, a simulation takes half a minute on one core."""


def simulate(
    context: typer.Context,
    job: JobArgument = None,
    overlays: ConfigOption = None,
    hardware: HardwareOption = "h100",
    nodes: NodesOption = None,
    memory: MemoryOption = None,
    post_training: PostTrainingOption = False,
    asked_format: FormatOption = None,
    output: OutputOption = None,
) -> None:
    """Predict the time and memory of every pipeline rank of a job under the schedule that the job sets.

    CONFIG and FLAGS are the job's training arguments. FLAGS override CONFIG.

    \b
    megatron-vp simulate configs/llama3_8b.yaml --nodes 4 --vocab-parallel --pipeline-schedule v-half
    """
    from megatron_vp.cost.layers.job_plan import plan_of
    from megatron_vp.cost.planning.candidates import refusal
    from megatron_vp.cost.planning.offloading import check_offload
    from megatron_vp.cost.planning.own_plan import own_plan
    from megatron_vp.cost.planning.predict import forward_only_seconds, predict
    from megatron_vp.schedule.graph import gc_paused

    output_format = format_for(asked_format, output, Format)
    asked = *files_and_flags(job, overlays), hardware, nodes, memory, options_of(context)
    request = Request.of(*read_cluster(*asked, post_training=post_training))
    whole, config = request.job, request.config
    _refuse_endless(whole, plan_of(config))
    plan = own_plan(config, whole, request.hardware, request.limit)
    if reason := refusal(config, plan):
        raise UserError(reason)
    with gc_paused():
        found = predict(whole, plan, request.hardware)
        if plan.offload_chunks:
            check_offload(found)
        document, lines = found.document(request.limit), []
        if post_training:
            document["forward_only_seconds"] = forward_only_seconds(whole, plan, request.hardware)
            lines = [f"{seconds(document['forward_only_seconds'])} s per forward-only call on as many microbatches"]
        if output_format is Format.JSON:
            content = json.dumps(request.document() | {"plan": document}, indent=1) + "\n"
        else:
            content = _table(request, found, lines)
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


def _table(request: Request, found: Prediction, more: list[str]) -> str:
    from megatron_vp.cost.layers.job_plan import bars_of

    makespan, peak = found.iteration_seconds - found.step, request.hardware.peak_flops
    memory = table(
        ["rank", "busy s", "idle %", "GiB", *found.memory[0].parts()],
        (
            [
                *(str(rank), seconds(busy), f"{100 * (1 - busy / makespan):.1f}"),
                *(f"{size / GIB:.1f}" for size in (held.total, *held.parts().values())),
            ]
            for rank, (busy, held) in enumerate(zip(found.busy, found.memory, strict=True))
        ),
        "memory in GiB by kind of data",
    )
    bars, plan, part = bars_of(request.config, found.plan, request.job), found.plan, found.seconds
    divided = {
        "vocabulary rows by rank": found.vocab_rows,
        "layers by stage": None if request.job.model.is_hybrid else plan.layers,
    }
    return "\n".join(
        [
            request.title,
            f"schedule {plan.schedule}{f' ({plan.shape})' if plan.shape else ''}, vocabulary {found.plan.method}"
            + "".join(f"; {what}: {','.join(map(str, counts))}" for what, counts in divided.items() if counts),
            *([] if bars is None else [f"segments by stage: {bars}"]),
            request.job.layers.line,
            "",
            f"{seconds(found.iteration_seconds)} s per iteration, {found.tokens_per_second:,.0f} tokens/s, "
            f"{found.mfu * peak / 1e12:.0f} TFLOP/s per GPU (by Megatron's formula), "
            f"MFU {100 * found.mfu:.1f} % of {peak / 1e12:.0f} TFLOP/s, bubble {100 * found.bubble_fraction:.1f} %",
            f"iteration time: mean work per rank {seconds(part['work'])} s, "
            f"excess work of the busiest rank {part['imbalance']:.3g} s, bubble {part['bubble']:.3g} s, "
            f"communication {part['communication']:.3g} s, gradient synchronisation and optimizer {found.step:.3g} s",
            *more,
            f"{memory_used(found, request.limit)}; bound by {found.bound_by(request.limit)}",
            *([STAYS_WHOLE] if request.config.get("vocab_parallel") and plan.vocab is VocabMethod.NONE else []),
            *_copies(request, found),
            "",
            memory + "\n".join(request.notes),
            "",
        ]
    )


def _copies(request: Request, found: Prediction) -> list[str]:
    """A line about the activations in host memory, if there are any."""
    from megatron_vp.cost.planning.offloading import fullest_node, host_room

    if not found.copies:
        return []
    taken = fullest_node(request.job, request.hardware, [each.host for each in found.copies])
    load, slowest = max((each.load, rank) for rank, each in enumerate(found.copies))
    return [
        f"host memory for offloaded activations on the fullest node: {taken / GIB:.0f} of "
        f"{host_room(request.hardware) / GIB:.0f} GiB; copies take {100 * load:.0f} % of the passes' time on rank "
        f"{slowest}" + "; fewer offloaded chunks shorten the iteration" * (load > 1)
    ]
