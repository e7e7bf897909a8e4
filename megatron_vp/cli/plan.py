"""`megatron-vp plan`: predict the time and memory of a job under all schedules, and recommend one run. With `--search`,
also with other parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    Request,
    memory_used,
    read_cluster,
    seconds,
    table,
)
from megatron_vp.cli.result_output import check_destination, format_for, progress_lines, write
from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.job_config import ONE_QUEUE, flags_of, yaml_of
from megatron_vp.jobs.known_options import files_and_flags

if TYPE_CHECKING:
    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.planning.choice import Choice
    from megatron_vp.cost.planning.predict import Prediction
    from megatron_vp.cost.planning.search import Search
    from megatron_vp.jobs.job_config import JobConfig

SHOWN = 12
"""The table of a search shows at most this many runs of the frontier; JSON has all."""

SIZES = ("tensor", "context", "pipeline", "data", "expert", "micro_batch", "recompute")
"""What differs between the runs of a search, as named in `Job`."""


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
            "llama3_8b takes about a minute of CPU time, on 32 and on 256 GPUs.",
        ),
    ] = False,
    search_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --search or --offload: run at most this many simulations (default 250). Simulations of the "
            "job's own parallel sizes without offload, and of runs to compare with, do not count. Unlike a time limit, "
            "this limit gives the same result on every machine.",
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Also try the schedules gis, gis-h and po, try offloading the activations of chunks to host memory "
            "under every schedule (--offload-chunks), and list slower runs that need less memory. --search-budget "
            "limits these simulations, too.",
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
    if keep and not search:
        raise UserError(f"--keep {keep[0]} has no effect without --search: add --search, or leave out --keep")
    if search_budget and not (search or offload):
        raise UserError(f"--search-budget {search_budget} has no effect: add --search or --offload, or leave it out")
    check_destination(False, write_schedule)
    answer = _answer(*read_cluster(*asked), search, keep or [], search_budget, offload)
    if write_schedule is not None:
        from megatron_vp.cost.planning.predict import make_simulator
        from megatron_vp.schedule import to_json

        simulator = make_simulator(answer.request.job, answer.choice.chosen.plan, answer.request.hardware)
        write(to_json(simulator.schedule) + "\n", write_schedule)
    write(answer.table() if output_format is Format.TABLE else json.dumps(answer.document(), indent=1) + "\n", output)


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
    from megatron_vp.cost.planning.choice import tie_band
    from megatron_vp.cost.planning.own_plan import own_plan
    from megatron_vp.cost.planning.search import BUDGET, Search
    from megatron_vp.cost.planning.variants import Variant, variants

    if searching:
        tried = variants(config, gpus, hardware, keep)
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
    chunks, progress = chunks_given(config) or 2, progress_lines()
    search = Search(tried, hardware, limit, budget or BUDGET, chunks, offload, given, config, progress=progress).run()
    return Answer(config, search, search.choice(tie_band(tried[0].job, hardware)), searching, refused)


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
        return Request(self.config | variant.settings, variant.job, self.search.hardware, self.search.limit)

    @cached_property
    def request(self) -> Request:
        """The planning request for the recommended run."""
        return self.request_of(self.choice.chosen)

    def settings(self, found: Prediction) -> dict[str, Any]:
        """The settings in which the run `found` differs from the configuration."""
        from megatron_vp.cost.layers.job_plan import settings_of

        request = self.request_of(found)
        sizes = self.search.tried[found.variant].settings
        changed = {name: value for name, value in sizes.items() if _changes(self.config.get(name), value)}
        return changed | settings_of(request.config, found.plan, request.job)

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
            [text(each) for text in columns.values()]
            for each in sorted(listed, key=lambda one: (not one.fits(limit), one.iteration_seconds))
        ]
        lines = [self.request.title, self.request.job.layers.line, *self._searched(), table([*columns], rows).rstrip()]
        lines += [self.refused] if self.refused else ["*: the job as given"] * any(each.given for each in listed)
        lines += self.request.notes
        lines += [f"not possible: {one.plan.schedule}, {one.method}: {reason}" for one, reason in search.impossible]
        lines += [*self._gains(), *self._tie(), f"the recommended run: {memory_used(chosen, limit)}"]
        return "\n".join([*lines, *self._how_to_run()])

    def _searched(self) -> list[str]:
        """Lines that state what a search compared."""
        search = self.search
        if not self.searching:
            return []
        lines = [
            f"{len(search.found):,} of {search.count:,} ways to train were simulated; the table has the frontier: runs "
            "that no other run beats in both time and memory"
        ]
        if search.untried:
            least = min(option.bound.seconds for option in search.untried)
            lines.append(
                f"The frontier is partial: {len(search.untried):,} ways to train, which take at least {seconds(least)} "
                f"s per iteration, were not tried, because --search-budget {search.budget} was used up"
            )
        return lines

    def _columns(self) -> dict[str, Callable[[Prediction], str]]:
        """The columns of the table: headings, and what is said of a run."""
        limit, gpus = self.search.limit, self.request.job.gpus
        headings = ("tensor", "context", "pipeline", "data", "expert", "micro\nbatch", "<recompute")
        columns: dict[str, Callable[[Prediction], str]] = {}
        if self.searching:
            columns = {
                heading: lambda each, name=name: str(getattr(each.job, name))
                for heading, name in zip(headings, SIZES, strict=True)
            }
        columns |= {
            "<schedule": lambda each: each.plan.label,
            "<vocabulary": lambda each: each.candidate.title + " *" * each.given,
            "s / iteration": lambda each: seconds(each.iteration_seconds),
            "tokens / s\nper GPU": lambda each: f"{each.tokens_per_second / gpus:,.0f}",
            "MFU %": lambda each: f"{100 * each.mfu:.1f}",
            "GiB": lambda each: f"{each.peak_memory / GIB:.1f}",
        }
        if self.search.offload:
            columns["host\nGiB"] = lambda each: f"{max((rank.host for rank in each.copies), default=0) / GIB:.1f}"
        if not self.searching:
            columns["<fits"] = lambda each: "yes" if each.fits(limit) else "no"
            columns["<bound by"] = lambda each: each.bound_by(limit)
        return columns

    def _name(self, each: Prediction) -> str:
        """A run that is compared with the recommended one, with the sizes in which it differs."""
        own = self.choice.chosen.job
        changed = [
            f"{name.replace('_', ' ')} {getattr(each.job, name)}"
            for name in SIZES
            if getattr(each.job, name) != getattr(own, name)
        ]
        return each.candidate.name + f", with {', '.join(changed)}" * bool(changed)

    def _gains(self) -> list[str]:
        """Lines that compare the recommended run with the best run without vocabulary parallelism, and with Megatron's
        own best run.
        """
        choice, lines = self.choice, []
        kinds = {"without_split": "without vocabulary parallelism", "in_megatron": "without megatron_vp"}
        for kind, what in kinds.items():
            other = getattr(choice, kind)
            if other is None:
                lines.append(f"no run {what} fits in memory")
            elif not getattr(choice.chosen.candidate, kind):
                lines.append(
                    f"{choice.gain_over(other):.2f} times as fast as the best run {what} that fits in memory "
                    f"({self._name(other)})"
                )
        return lines

    def _tie(self) -> list[str]:
        """A line that states which runs tie for fastest."""
        choice, chosen, fastest = self.choice, self.choice.chosen, self.choice.tied[0]
        if len(choice.tied) == 1:
            return []
        ahead = 100 * (chosen.iteration_seconds / fastest.iteration_seconds - 1)
        said = "it is also the fastest" if chosen is fastest else f"{self._name(fastest)} is {ahead:.1f} % faster"
        return [
            f"a tie: {len(choice.tied)} runs differ by at most {100 * choice.band:.0f} % in time, the error of "
            f"predictions; {chosen.candidate.name} is the simplest; {said}"
        ]

    def _how_to_run(self) -> list[str]:
        """Lines that show how to configure the recommended run: the flags to add, and an overlay file."""
        settings, job, choice = self.settings(self.choice.chosen), self.request.job, self.choice
        slower = not choice.chosen.candidate.without_split and (choice.gain_over(choice.without_split) or 1) < 1
        use = "no gain in time; to run with this memory, use: " if slower else "use: "
        lines = ["", use + (flags_of(settings) or "the configuration without changes")]
        if unset := _unset(settings):
            lines.append(f"and unset {', '.join(unset)} with a configuration file, such as the one below")
        if self.request.hardware.is_gpu and max(job.tensor, job.context) > 1:
            lines.append(
                f"and set the environment variable {ONE_QUEUE}=1, which Megatron requires on GPUs before Blackwell"
            )
        lines.append("Megatron has not checked these settings: run megatron-vp check with them before you train")
        return [*lines, "", yaml_of(settings)]

    def document(self) -> dict[str, Any]:
        """The answer as a JSON document. Runs of a plan are named by their index in `plans`, those of a search are
        written out.
        """
        search, choice = self.search, self.choice

        def entry(each: Prediction) -> dict[str, Any]:
            sizes, settings = {name: getattr(each.job, name) for name in SIZES}, self.settings(each)
            # `overlay` always reproduces the run, but `flags` reproduces it only if `unset` is empty.
            return (
                sizes
                | each.document(search.limit)
                | {
                    "given": each.given,
                    "settings": settings,
                    "flags": flags_of(settings),
                    "unset": [option_of(name) for name in _unset(settings)],
                    "overlay": yaml_of(settings),
                }
            )

        named: Callable[[Prediction], Any] = entry if self.searching else search.found.index
        compared = {
            "given": next((each for each in search.found if each.given), None),
            "without_split": choice.without_split,
            "in_megatron": choice.in_megatron,
        }
        document = self.request.document() | {
            "best": named(choice.chosen),
            **{name: each and named(each) for name, each in compared.items()},
            "gain": choice.gain_over(choice.without_split),
            "gain_over_megatron": choice.gain_over(choice.in_megatron),
            "tie_band": choice.band,
            "frontier": [*map(named, search.frontier)],
        }
        if self.searching:
            return document | {
                "combinations": search.count,
                "simulated": len(search.found),
                "untried": len(search.untried),
            }
        return document | {
            "tied": [*map(named, choice.tied)],
            "plans": [*map(entry, search.found)],
            "impossible": [
                {"schedule": one.plan.schedule, "method": one.method, "reason": reason}
                for one, reason in search.impossible
            ],
        }


def _changes(own: object, value: object) -> bool:
    return (own or None) != (value or None) and not (value == 1 and own is None)


def _unset(settings: dict[str, Any]) -> list[str]:
    """The settings that flags cannot express, because they unset an argument."""
    return [name for name, value in settings.items() if value is None or value is False]
