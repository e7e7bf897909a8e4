"""`megatron-vp plan`: predict the time and memory of a job under all schedules, and recommend one run. With `--search`,
also with other parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_vp.cli.job import ConfigOption, JobArgument, options_of
from megatron_vp.cli.planning import (
    FORMAT_HELP,
    GIB,
    Format,
    HardwareOption,
    MemoryOption,
    NodesOption,
    OutputOption,
    Request,
    gains,
    how_to_run,
    memory_room,
    read_cluster,
    seconds,
    table,
    what_to_set,
)
from megatron_vp.cli.result_output import check_destination, format_for, progress_bar, write
from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import files_and_flags

if TYPE_CHECKING:
    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.planning.choice import Choice
    from megatron_vp.cost.planning.predict import Prediction
    from megatron_vp.cost.planning.search import Search
    from megatron_vp.jobs.job_config import JobConfig

SHOWN = 12
"""The table of a search shows at most this many runs of the frontier; JSON and the picture show all."""


def plan(
    context: typer.Context,
    job: JobArgument = None,
    overlays: ConfigOption = None,
    hardware: HardwareOption = "h100",
    nodes: NodesOption = None,
    memory: MemoryOption = None,
    asked_format: Annotated[Format | None, typer.Option("--format", help=FORMAT_HELP)] = None,
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
            "llama3_8b takes about a minute of CPU time, on 32 and on 256 GPUs.",
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
    output_format = format_for(asked_format, output, Format)
    asked = *files_and_flags(job, overlays), hardware, nodes, memory, options_of(context)
    if search and write_schedule is not None:
        raise UserError(
            "--write-schedule cannot be combined with --search: search first, then plan the job that was found"
        )
    for option, value in (("--keep", keep and keep[0]), ("--search-budget", search_budget)):
        if value and not search:
            raise UserError(f"{option} {value} has no effect without --search: add --search, or leave out {option}")
    check_destination(False, write_schedule)
    answer = _answer(*read_cluster(*asked), search, keep or [], search_budget, offload)
    if write_schedule is not None:
        from megatron_vp.cost.planning.predict import make_simulator
        from megatron_vp.schedule import to_json

        chosen, request = answer.choice.chosen, answer.request
        simulator = make_simulator(request.job, chosen.candidate.plan, request.hardware)
        write(to_json(simulator.schedule) + "\n", write_schedule)
    match output_format:
        case Format.TABLE:
            content: str | bytes = answer.table()
        case Format.JSON:
            content = json.dumps(answer.document(), indent=1) + "\n"
        case Format.PNG:
            from megatron_vp.cost.planning.charts import runs_chart

            content = runs_chart(answer.search, answer.choice.chosen, "\n".join(answer.heading))
    write(content, output)


def _answer(
    config: JobConfig,
    hardware: Hardware,
    gpus: int | None,
    limit: float,
    searching: bool,
    keep: list[str],
    budget: int | None,
    offload: bool,
) -> Answer:
    """Compare the ways to train a job, and choose one of them. Raises UserError."""
    from megatron_vp.cost.layers.job_plan import chunks_given, plan_of
    from megatron_vp.cost.layers.shapes import Recompute
    from megatron_vp.cost.planning.candidates import check_pipeline
    from megatron_vp.cost.planning.choice import tie_of
    from megatron_vp.cost.planning.own_plan import own_plan
    from megatron_vp.cost.planning.search import BUDGET, Search
    from megatron_vp.cost.planning.variants import DIMENSIONS, Variant, variants

    if searching:
        if gpus is None:
            raise UserError("--search needs the size of the cluster: give the number of nodes with --nodes")
        for name in keep:
            if name not in DIMENSIONS:
                raise UserError(f"--keep {name} is not a setting that --search varies; use {', '.join(DIMENSIONS)}")
        tried = variants(config.values, gpus, hardware, keep)
    else:
        job = Request.of(config, hardware, gpus, limit).job
        check_pipeline(job)
        if offload and job.recompute is Recompute.FULL:
            raise UserError(
                "--offload cannot be combined with --recompute-granularity full, which leaves almost no activations to "
                "offload: leave out one of the two"
            )
        plan_of(config)
        tried = [Variant(job, {}, own=True)]
    given, refused = None, ""
    if tried[0].own:
        try:
            given = own_plan(config, tried[0].job, hardware, limit)
        except UserError as error:
            refused = f"the job as given cannot run: {error}"
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)

        chunks = chunks_given(config) or 2
        search = Search(
            tried, hardware, limit, budget or BUDGET, chunks, offload, given, config.values, progress=progress
        ).run()
    return Answer(config, search, search.choice(tie_of(tried[0].job, hardware).share), searching, refused)


@dataclass(frozen=True)
class Answer:
    """The compared runs of a job, and the recommended one.

    searching: whether the runs have different parallel sizes.
    refused: why the job cannot run as given; empty if it can.
    """

    config: JobConfig
    search: Search
    choice: Choice
    searching: bool
    refused: str

    def request_of(self, found: Prediction) -> Request:
        """The planning request for the job with the parallel sizes of the run `found`."""
        variant = self.search.tried[found.variant]
        config = replace(self.config, values=self.config.values | variant.settings)
        return Request(config, variant.job, self.search.hardware, self.search.limit)

    @cached_property
    def request(self) -> Request:
        """The planning request for the recommended run."""
        return self.request_of(self.choice.chosen)

    def settings(self, found: Prediction) -> dict[str, Any]:
        """The settings in which the run `found` differs from the configuration."""
        from megatron_vp.cost.layers.job_plan import settings_of

        request = self.request_of(found)
        sizes = self.search.tried[found.variant].settings
        changed = {name: value for name, value in sizes.items() if _changes(self.config.values.get(name), value)}
        return changed | settings_of(request.config, found.candidate.plan, request.job)

    def sizes(self, found: Prediction) -> dict[str, Any]:
        """The sizes of the run `found` that a search varies, and its data-parallel size."""
        job = self.search.tried[found.variant].job
        names = ("tensor", "context", "pipeline", "data", "expert", "micro_batch", "recompute")
        return {name: getattr(job, name) for name in names}

    @property
    def given(self) -> Prediction | None:
        """The run of the job as its configuration describes it; None if it cannot run."""
        return next((each for each in self.search.found if each.given), None)

    @property
    def heading(self) -> list[str]:
        """Lines that describe the job, its hardware and, for a search, which runs were compared."""
        found = self.search
        if not self.searching:
            return [self.request.title]
        job = found.tried[0].job
        vocabulary = self.config.values.get("vocab_size") or job.model.vocab
        title = (
            f"{job.gpus} x {found.hardware.title}: {found.count:,} ways to train with "
            f"{job.microbatches * job.micro_batch * job.data} x {job.sequence} tokens per iteration, vocabulary "
            f"{vocabulary}; {len(found.found):,} simulated"
        )
        if not found.untried:
            return [title, "The frontier: runs that no other run beats in both time and memory."]
        least = min(option.bound.seconds for option in found.untried)
        fastest = (
            "possibly including the fastest" if least <= found.fitting[0].iteration_seconds else "all of them slower"
        )
        likely = sum(found.front.expects(option.bound) for option in found.untried)
        return [
            title,
            f"The frontier is partial: {len(found.untried):,} ways to train were not tried, {fastest} (each takes at "
            f"least {seconds(least)} s per iteration); {likely or 'none'} of them probably belong to the frontier. All "
            f"simulations of --search-budget {found.budget} were used; a larger budget allows more.",
        ]

    def table(self) -> str:
        """The answer as text."""
        from megatron_vp.cost.planning.bounds import thinned

        search, chosen, limit = self.search, self.choice.chosen, self.search.limit
        listed = search.found
        if self.searching or search.offload:
            kept = thinned(search.frontier, SHOWN)
            listed = [each for each in search.found if each in kept or each is chosen or each.given]
        columns = self._columns()
        rows = [
            [text(each) for _, text in columns]
            for each in sorted(listed, key=lambda one: (not one.fits(limit), one.iteration_seconds))
        ]
        given = [self.refused] if self.refused else [] if self.given is None else ["*: the job as given"]
        lines = [*self.heading, self.request.job.layers.line, *([] if self.searching else [self.request.shards])]
        lines += [table([heading for heading, _ in columns], rows) + "\n".join([*given, *self.request.notes])]
        lines += [f"not possible: {one.plan.schedule}, {one.method}: {reason}" for one, reason in search.impossible]
        if search.offload:
            away = sum(1 for each in search.found if each.candidate.plan.offload_chunks)
            lines.append(
                f"offloading of activations to host memory: tried with {search.offload_sizes} combinations of parallel "
                f"sizes, {away} runs simulated"
            )
        lines += gains(self.choice, self._name) + self._tie()
        lines += memory_room(self.request, chosen, [] if self.searching else search.found, self.searching)
        return "\n".join([*lines, *how_to_run(self.settings(chosen), self.request, self.choice)])

    def _columns(self) -> list[tuple[str, Callable[[Prediction], str]]]:
        limit, gpus = self.search.limit, self.request.job.gpus
        names = ("tensor", "context", "pipeline", "data", "expert", "micro\nbatch", "<recompute")
        sizes = [(name, lambda each, at=at: str([*self.sizes(each).values()][at])) for at, name in enumerate(names)]
        columns: list[tuple[str, Callable[[Prediction], str]]] = [
            *(sizes if self.searching else []),
            ("<schedule", lambda each: each.candidate.plan.label),
            ("<vocabulary", lambda each: each.candidate.title + " *" * each.given),
            ("s / iteration", lambda each: seconds(each.iteration_seconds)),
            ("tokens / s\nper GPU", lambda each: f"{each.tokens_per_second / gpus:,.0f}"),
            ("MFU %", lambda each: f"{100 * each.mfu:.1f}"),
            ("GiB", lambda each: f"{each.peak_memory / GIB:.1f}"),
        ]
        if self.search.offload:
            columns.append(("host\nGiB", _host_gib))
        if not self.searching:
            columns.insert(-1, ("bubble %", lambda each: f"{100 * each.bubble_fraction:.1f}"))
            columns.append(("<fits", lambda each: "yes" if each.fits(limit) else "no"))
            columns.append(("<bound by", lambda each: each.bound_by(limit)))
        return columns

    def _name(self, each: Prediction) -> str:
        """A run that is compared with the recommended one, with the sizes in which it differs."""
        if not self.searching:
            return each.candidate.name
        chosen, sizes = self.sizes(self.choice.chosen), self.sizes(each)
        changed = [f"{size.replace('_', ' ')} {value}" for size, value in sizes.items() if value != chosen[size]]
        return f"{each.candidate.name}, " + (f"with {', '.join(changed)}" if changed else "at the same sizes")

    def _tie(self) -> list[str]:
        """A line that states which runs tie for fastest."""
        limit, choice, chosen = self.search.limit, self.choice, self.choice.chosen
        if len(choice.tied) == 1:
            return []
        fastest = choice.tied[0]
        avoided = not chosen.is_tight(limit) and any(each.is_tight(limit) for each in choice.tied)
        ahead = 100 * (chosen.iteration_seconds / fastest.iteration_seconds - 1)
        said = "it is also the fastest" if chosen is fastest else f"{self._name(fastest)} is {ahead:.1f} % faster"
        return [
            f"a tie: the iteration times of {len(choice.tied)} runs differ by at most {self.request.tie.text}; "
            f"{chosen.candidate.name} is the simplest{' that leaves memory free' if avoided else ''}; {said}"
        ]

    def document(self) -> dict[str, Any]:
        """The answer as a JSON document. Runs of a plan are named by their index in `plans`, those of a search are
        written out.
        """
        search, choice = self.search, self.choice

        def entry(each: Prediction) -> dict[str, Any]:
            found = self.sizes(each) | each.document(search.limit) | {"given": each.given}
            return found | what_to_set(self.settings(each))

        named: Callable[[Prediction], Any] = entry if self.searching else search.found.index
        compared = {"given": self.given, "without_split": choice.without_split, "in_megatron": choice.in_megatron}
        document = self.request.document() | {
            "best": named(choice.chosen),
            **{name: each and named(each) for name, each in compared.items()},
            "gain": choice.gain,
            "gain_over_megatron": choice.gain_over_megatron,
            "tie_band": self.request.tie.share,
        }
        if not self.searching:
            return document | {
                "tied": [*map(named, choice.tied)],
                "plans": [*map(entry, search.found)],
                "frontier": [*map(named, search.frontier)],
                "impossible": [
                    {"schedule": one.plan.schedule, "method": one.method, "reason": reason}
                    for one, reason in search.impossible
                ],
            }
        return document | {
            "frontier": [*map(entry, search.frontier)],
            "combinations": search.count,
            "simulated": len(search.found),
            "untried": len(search.untried),
            "untried_seconds": min((option.bound.seconds for option in search.untried), default=None),
            "budget": search.budget,
            "offload_sizes": search.offload_sizes if search.offload else None,
            "partial": bool(search.untried),
            "heading": self.heading[-1],
        }


def _changes(own: object, value: object) -> bool:
    return (own or None) != (value or None) and not (value == 1 and own is None)


def _host_gib(each: Prediction) -> str:
    host = max((copies.host for copies in each.copies), default=0.0)
    return f"{host / GIB:.1f}" if host else ""
