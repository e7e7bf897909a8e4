"""`megatron-vp plan`: predict the time and memory of a job under all schedules, and recommend one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument, options_of
from megatron_vp.cli.memory_room import memory_room
from megatron_vp.cli.plan_search import search_job
from megatron_vp.cli.planning import (
    GIB,
    Format,
    FormatOption,
    HardwareOption,
    MemoryOption,
    NodesOption,
    OutputOption,
    Request,
    gains,
    how_to_run,
    read_cluster,
    read_request,
    seconds,
    table,
    what_to_set,
)
from megatron_vp.cli.result_output import check_destination, format_for, progress_bar, write
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import files_and_flags

if TYPE_CHECKING:
    from megatron_vp.cost.planning.evaluation import Evaluation
    from megatron_vp.cost.planning.planner import Choice, Infeasible
    from megatron_vp.cost.planning.ties import Tie
    from megatron_vp.cost.sizes.shapes import Plan


def plan(
    context: typer.Context,
    job: JobArgument = None,
    overlays: ConfigOption = None,
    hardware: HardwareOption = "h100",
    nodes: NodesOption = None,
    memory: MemoryOption = None,
    asked_format: FormatOption = None,
    output: OutputOption = None,
    write_schedule: Annotated[
        Path | None,
        typer.Option(
            help="Also write the best run's schedule to this JSON file. The order of its passes follows from their "
            "predicted times. To train with it, give --pipeline-schedule FILE."
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Also vary the tensor, context, pipeline, expert and data parallel sizes, the micro-batch size and "
            "recomputation. The number of GPUs (see --nodes) and the job's global batch size stay fixed. A search for "
            "llama3_8b takes 60 to 80 seconds of CPU time, on 32 and on 256 GPUs.",
        ),
    ] = False,
    search_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --search: run at most this many simulations (default 250). Simulations of the job's own "
            "parallel sizes, and of runs to compare with, do not count. Unlike a time limit, this limit gives the same "
            "result on every machine.",
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Also try the schedules gis, gis-h and po, try offloading the activations of chunks to host memory "
            "under every schedule (--offload-chunks), and list slower runs that need less memory. With --search, "
            "offloading is tried only for the job's own parallel sizes and up to four other combinations of sizes.",
        ),
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="With --search: do not vary this setting (tensor, context, pipeline, expert, micro-batch or "
            "recompute). May be repeated."
        ),
    ] = None,
) -> None:
    """Rank all plain and vocabulary-parallel schedules for a job by predicted time. Plain schedules are also tried with
    layers redistributed to balance the stages.

    CONFIG and FLAGS are the job's training arguments. FLAGS override CONFIG.

    \b
    megatron-vp plan configs/llama3_8b.yaml --hardware h100 --nodes 4 --pipeline-model-parallel-size 16
    megatron-vp plan configs/llama3_8b.yaml --hardware h100 --nodes 32 --search
    """
    from megatron_vp.cost.balance.chosen_shards import gain_of_next_start
    from megatron_vp.cost.planning.candidates import refusal
    from megatron_vp.cost.planning.front import frontier
    from megatron_vp.cost.planning.planner import Infeasible, choose
    from megatron_vp.cost.planning.planner import plan as make_plan
    from megatron_vp.cost.sizes.job_plan import plan_of
    from megatron_vp.cost.sizes.shapes import Recompute

    output_format = format_for(asked_format, output, Format)
    asked = *files_and_flags(job, overlays), hardware, nodes, memory, options_of(context)
    if search:
        if write_schedule is not None:
            raise UserError(
                "--write-schedule cannot be combined with --search: search first, then plan the job that was found"
            )
        search_job(*read_cluster(*asked), keep or (), search_budget, offload, output_format, output)
        return
    for option, value in (("--keep", keep and keep[0]), ("--search-budget", search_budget)):
        if value:
            raise UserError(f"{option} {value} has no effect without --search: add --search, or leave out {option}")
    check_destination(False, write_schedule)
    request = read_request(*asked)
    if offload and request.job.recompute is Recompute.FULL:
        raise UserError(
            "--offload cannot be combined with --recompute-granularity full, which leaves almost no activations to "
            "offload: leave out one of the two"
        )
    own = plan_of(request.config)
    with progress_bar() as bar:
        task = bar.add_task("predicting", total=None)
        evaluations, infeasible = make_plan(
            request.job,
            request.hardware,
            chunks=own.chunks or 2,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
            limit=request.limit,
            offload=offload,
        )
    for each in list(evaluations):
        if reason := refusal(request.config.values, each.candidate.plan):
            evaluations.remove(each)
            infeasible.append(Infeasible(each.candidate, reason))
    choice = choose(evaluations, request.limit, request.tie.share)
    next_start = gain_of_next_start(request.config, own, request.job, request.hardware)
    chosen, best = choice.chosen, frontier(evaluations) if offload else []
    if write_schedule is not None:
        from megatron_vp.cost.prediction.predict import make_simulator
        from megatron_vp.schedule import to_json

        simulator = make_simulator(request.job, chosen.candidate.plan, request.hardware)
        write(to_json(simulator.schedule) + "\n", write_schedule)
    match output_format:
        case Format.TABLE:
            notes = [next_start] if next_start else []
            content: str | bytes = _table(request, evaluations, infeasible, choice, best, notes)
        case Format.JSON:
            document = _document(request, evaluations, infeasible, choice)
            if offload:
                document |= {"frontier": [*map(evaluations.index, best)]}
            content = json.dumps(document, indent=1) + "\n"
        case Format.PNG:
            from megatron_vp.cost.planning.charts import plan_chart

            content = plan_chart(evaluations, chosen, request.limit, request.title)
    write(content, output)


def _table(
    request: Request,
    evaluations: list[Evaluation],
    infeasible: list[Infeasible],
    choice: Choice,
    best: list[Evaluation],
    notes: list[str],
) -> str:
    from megatron_vp.cost.sizes.job_plan import settings_of

    limit = request.limit
    headings = [
        "<schedule",
        "<vocabulary",
        "<shards",
        "s / iteration",
        "tokens / s",
        "MFU %",
        "bubble %",
        "GiB",
        "<fits",
    ]
    rows = [
        (
            each.candidate.plan.label,
            each.candidate.method,
            _shards(each.candidate.plan),
            seconds(each.iteration_seconds),
            f"{each.tokens_per_second:,.0f}",
            f"{100 * each.mfu:.1f}",
            f"{100 * each.bubble_fraction:.1f}",
            f"{each.peak_memory / GIB:.1f}",
            "yes" if each.fits(limit) else "no",
            each.bound_by(limit),
        )
        for each in sorted(evaluations, key=lambda one: (not one.fits(limit), one.iteration_seconds))
    ]
    tables = table([*headings, "<bound by"], rows) + (_frontier_table(best) if best else "")
    lines = [request.title, request.job.layers.line, request.shards, tables + "\n".join(request.notes)]
    lines += [
        f"not possible: {one.candidate.plan.schedule}, {one.candidate.method}: {one.reason}" for one in infeasible
    ]
    lines += _comparison(choice, request.tie, limit)
    lines += memory_room(request, choice.chosen, evaluations)
    lines += notes
    settings = settings_of(request.config, choice.chosen.candidate.plan, request.job)
    return "\n".join([*lines, *how_to_run(settings, request, choice)])


def _frontier_table(best: list[Evaluation]) -> str:
    rows = []
    for each in best:
        host = max((copies.host for copies in each.copies), default=0.0)
        figures = f"{each.peak_memory / GIB:.1f}", seconds(each.iteration_seconds), f"{host / GIB:.1f}" if host else ""
        rows.append((*figures, each.candidate.plan.label, each.candidate.method))
    title = "runs that no other run beats in both memory and time, fastest first"
    return table(["GiB", "s / iteration", "host GiB", "<schedule", "<vocabulary"], rows, title)


def _shards(plan: Plan) -> str:
    return "" if not plan.vocab.is_sharded else "even" if plan.vocab_rows is None else "balanced"


def _comparison(choice: Choice, tie: Tie, limit: float) -> list[str]:
    """Lines that compare the recommended run with others, and state which runs tie for fastest."""
    chosen = choice.chosen
    lines = gains(choice)
    if len(choice.tied) > 1:
        fastest = choice.tied[0]
        avoided = not chosen.is_tight(limit) and any(each.is_tight(limit) for each in choice.tied)
        ahead = chosen.iteration_seconds / fastest.iteration_seconds - 1
        said = (
            f"{fastest.candidate.name} is {100 * ahead:.1f} % faster"
            if chosen is not fastest
            else "it is also the fastest"
        )
        lines.append(
            f"a tie: the iteration times of {len(choice.tied)} runs differ by at most {tie.text}; "
            f"{chosen.candidate.name} is the simplest"
            f"{' that leaves memory free' if avoided else ''}; {said}"
        )
    return lines


def _document(
    request: Request, evaluations: list[Evaluation], infeasible: list[Infeasible], choice: Choice
) -> dict[str, object]:
    from megatron_vp.cost.sizes.job_plan import settings_of

    def entry(each: Evaluation) -> dict[str, object]:
        settings = settings_of(request.config, each.candidate.plan, request.job)
        return each.document(request.limit) | what_to_set(settings)

    return request.document() | {
        "best": evaluations.index(choice.chosen),
        "tie_band": request.tie.share,
        "tied": [*map(evaluations.index, choice.tied)],
        "without_split": choice.without_split and evaluations.index(choice.without_split),
        "gain": choice.gain,
        "in_megatron": choice.in_megatron and evaluations.index(choice.in_megatron),
        "gain_over_megatron": choice.gain_over_megatron,
        "plans": [entry(each) for each in evaluations],
        "impossible": [
            {"schedule": one.candidate.plan.schedule, "method": one.candidate.method, "reason": one.reason}
            for one in infeasible
        ],
    }
