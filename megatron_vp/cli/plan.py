"""`megatron-vp plan`: say whether a job gains from this package, and predict its time and memory under all schedules.
With `--search`, also with other parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    from megatron_vp.cost.planning.choice import Verdict
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
    """Say whether a job gains from megatron_vp, and rank all plain and vocabulary-parallel schedules by predicted time.
    Plain schedules are also tried with layers redistributed to balance the stages.

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
    answer = answer_for(*read_cluster(*asked), search, keep or [], search_budget, offload)
    if write_schedule is not None:
        from megatron_vp.cost.planning.predict import make_simulator
        from megatron_vp.schedule import to_json

        simulator = make_simulator(answer.request.job, answer.verdict.best.plan, answer.request.hardware)
        write(to_json(simulator.schedule) + "\n", write_schedule)
    write(answer.table() if output_format is Format.TABLE else json.dumps(answer.document(), indent=1) + "\n", output)


def answer_for(
    config: JobConfig,
    hardware: Hardware,
    gpus: int | None,
    limit: float,
    searching: bool = False,
    keep: Sequence[str] = (),
    budget: int | None = None,
    offload: bool = False,
) -> Answer:
    """Compare the ways to train a job within `limit` bytes per rank. Raises UserError; also if nothing fits."""
    from megatron_vp.cost.layers.job_plan import chunks_given, plan_of
    from megatron_vp.cost.layers.shapes import Recompute
    from megatron_vp.cost.planning.candidates import check_pipeline, placed_heads
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
        tried = [Variant(each, {}) for each in placed_heads(job)]
    given, refused = None, ""
    if not tried[0].settings:
        job = Request.of(config, hardware, gpus, limit).job
        try:
            given = job, own_plan(config, job, hardware, limit)
        except UserError as error:
            refused = f"the job as given cannot run: {error}"
    chunks, progress = chunks_given(config) or 2, progress_lines()
    search = Search(tried, hardware, limit, budget or BUDGET, chunks, offload, given, config, progress=progress).run()
    return Answer(config, search, search.verdict, searching, refused)


@dataclass(frozen=True)
class Answer:
    """The compared runs of a job, and whether one of them is worth it.

    searching: whether the runs have different parallel sizes.
    refused: why the job cannot run as given; empty if it can.
    """

    config: JobConfig
    search: Search
    verdict: Verdict
    searching: bool
    refused: str

    def request_of(self, found: Prediction) -> Request:
        """The planning request for the job with the parallel sizes of the run `found`."""
        return Request(self.config | dict(found.settings), found.job, self.search.hardware, self.search.limit)

    @cached_property
    def request(self) -> Request:
        """The planning request for the recommended run."""
        return self.request_of(self.verdict.best)

    def settings(self, found: Prediction) -> dict[str, Any]:
        """The settings in which the run `found` differs from the configuration."""
        from megatron_vp.cost.layers.job_plan import settings_of

        request = self.request_of(found)
        changed = {name: value for name, value in found.settings.items() if _changes(self.config.get(name), value)}
        return changed | settings_of(request.config, found.plan, request.job)

    def table(self) -> str:
        """The answer as text: first the verdict, then the recommended run beside the job as given, then the others."""
        from megatron_vp.cost.planning.bounds import thinned

        search, verdict, limit = self.search, self.verdict, self.search.limit
        kept, listed = thinned(search.frontier, SHOWN), search.found
        if self.searching or search.offload:
            listed = [each for each in listed if each in kept or each in (verdict.best, verdict.rival) or each.given]

        def place(each: Prediction) -> tuple[Any, ...]:
            return each is not verdict.best, not each.given, not each.fits(limit), each.iteration_seconds

        columns = self._columns()
        rows = [[text(each) for text in columns.values()] for each in sorted(listed, key=place)]
        reasons = dict[str, dict[str, None]]()
        for plan, reason in search.impossible:
            reasons.setdefault(reason, {})[plan.schedule] = None
        lines = [
            *(self.sentence(), *self._how_to_run(), "", self.request.title, self.request.job.layers.line),
            *(memory_used(verdict.best, limit), *self._searched(), table([*columns], rows).rstrip(), self._legend()),
            *([self.refused] if self.refused else []),
            *(f"not possible: {reason} ({', '.join(schedules)})" for reason, schedules in reasons.items()),
        ]
        return "\n".join([*lines, *self.request.notes, ""])

    def sentence(self) -> str:
        """The verdict in one sentence."""
        verdict, limit = self.verdict, self.search.limit
        rival, ours, answer = verdict.rival, verdict.ours, verdict.answer
        if rival is None or ours is None or verdict.speedup is None or verdict.memory_saved is None:
            return f"{answer}: Megatron itself cannot run this job"
        if ours is rival:
            alone = "with one pipeline stage, there are no ranks to share the vocabulary"
            none = f"no run with megatron_vp fits into {limit / GIB:.4g} GiB"
            return f"{answer}: {alone if ours.job.pipeline == 1 else none}"
        without, size = f"run without megatron_vp ({self._name(rival)})", abs(verdict.memory_saved) / GIB
        memory = f"{size:.1f} GiB {'less' if verdict.memory_saved >= 0 else 'more'} memory"
        if not rival.fits(limit):
            return (
                f"{answer}: no run without megatron_vp fits into {limit / GIB:.4g} GiB; this one needs {size:.1f} GiB "
                f"less than the smallest of them ({self._name(rival)})"
            )
        if answer == "smaller":
            return f"{answer}: {memory} than the best {without}, at {verdict.speedup:.2f} times its speed"
        subject = "" if answer == "faster" else f"the best run with megatron_vp ({self._name(ours)}) is "
        return f"{answer}: {subject}{verdict.speedup:.2f} times as fast as the best {without}, with {memory}"

    def _legend(self) -> str:
        given = "*: the job as given; " * any(each.given for each in self.search.found)
        bound = "" if self.searching else "; bound by: what most lost time is due to, or memory if the run does not fit"
        return f"{given}GiB: memory of the fullest GPU{bound}"

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
            "<vocabulary": lambda each: each.plan.title + " *" * each.given,
            "s / iteration": lambda each: seconds(each.iteration_seconds),
            "tokens / s\nper GPU": lambda each: f"{each.tokens_per_second / gpus:,.0f}",
            "GiB": lambda each: f"{each.peak_memory / GIB:.1f}",
        }
        if self.search.offload:
            columns["host\nGiB"] = lambda each: f"{max((rank.host for rank in each.copies), default=0) / GIB:.1f}"
        if not self.searching:
            columns["<bound by"] = lambda each: each.bound_by(limit)
        return columns

    def _name(self, each: Prediction) -> str:
        """A run that is compared with the recommended one, with the sizes in which it differs."""
        own = self.verdict.best.job
        changed = [
            f"{name.replace('_', ' ')} {getattr(each.job, name)}"
            for name in SIZES
            if getattr(each.job, name) != getattr(own, name)
        ]
        return each.plan.name + f", with {', '.join(changed)}" * bool(changed)

    def _how_to_run(self) -> list[str]:
        """Lines that show how to configure the recommended run: the flags to add or, where flags do not do, a file."""
        settings, job = self.settings(self.verdict.best), self.request.job
        lines = [f"use: {flags_of(settings) or 'the configuration without changes'}"]
        if _unset(settings):
            lines = ["use the configuration file:", yaml_of(settings).rstrip()]
        if self.request.hardware.is_gpu and max(job.tensor, job.context) > 1:
            lines.append(
                f"and set the environment variable {ONE_QUEUE}=1, which Megatron requires on GPUs before Blackwell"
            )
        return [*lines, "Megatron has not checked these settings: run megatron-vp check with them before you train"]

    def entry(self, found: Prediction) -> dict[str, Any]:
        """A run as part of a JSON document. Its `overlay` always reproduces it, but its `flags` only if `unset` is
        empty.
        """
        settings = self.settings(found)
        return (
            {name: getattr(found.job, name) for name in SIZES}
            | found.document(self.search.limit)
            | {
                "given": found.given,
                "settings": settings,
                "flags": flags_of(settings),
                "unset": [option_of(name) for name in _unset(settings)],
                "overlay": yaml_of(settings),
            }
        )

    def document(self) -> dict[str, Any]:
        """The answer as a JSON document. Runs of a plan are named by their index in `plans`, those of a search are
        written out.
        """
        search, verdict = self.search, self.verdict
        named: Callable[[Prediction], Any] = self.entry if self.searching else search.found.index
        given = next((each for each in search.found if each.given), None)
        document = self.request.document() | {
            "verdict": {
                "answer": verdict.answer,
                "rival": verdict.rival and self.entry(verdict.rival),
                "ours": verdict.ours and self.entry(verdict.ours),
                "speedup": verdict.speedup,
                "memory_saved_gib": verdict.memory_saved and verdict.memory_saved / GIB,
            },
            "best": named(verdict.best),
            "given": given and named(given),
            "frontier": [*map(named, search.frontier)],
        }
        if self.searching:
            return document | {
                "combinations": search.count,
                "simulated": len(search.found),
                "untried": len(search.untried),
            }
        return document | {
            "plans": [*map(self.entry, search.found)],
            "impossible": [
                {"schedule": plan.schedule, "method": plan.method, "reason": reason}
                for plan, reason in search.impossible
            ],
        }


def _changes(own: object, value: object) -> bool:
    return (own or None) != (value or None) and not (value == 1 and own is None)


def _unset(settings: dict[str, Any]) -> list[str]:
    """The settings that flags cannot express, because they unset an argument."""
    return [name for name, value in settings.items() if value is None or value is False]
