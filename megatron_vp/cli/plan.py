"""`megatron-vp plan`: say whether a job gains from this package, and predict its time and memory under all schedules.
With `--search`, also with other parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
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
    PostTrainingOption,
    Request,
    memory_used,
    read_cluster,
    seconds,
    table,
)
from megatron_vp.cli.result_output import format_for, progress_lines, write
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

SIZES = ("tensor", "context", "pipeline", "data", "expert", "micro_batch", "recompute")
"""What differs between the runs of a search, as named in `Job`."""


def plan(
    context: typer.Context,
    job: JobArgument = None,
    overlays: ConfigOption = None,
    hardware: HardwareOption = "h100",
    nodes: NodesOption = None,
    memory: MemoryOption = None,
    post_training: PostTrainingOption = False,
    asked_format: FormatOption = None,
    output: OutputOption = None,
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
    cluster = read_cluster(*asked, post_training=post_training)
    answer = answer_for(*cluster, search, keep or [], search_budget, offload)
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
    earlier: Search | None = None,
) -> Answer:
    """Compare the ways to train a job within `limit` bytes per rank. Raises UserError; also if nothing fits.

    earlier: a search of the same job within another limit.
    """
    from megatron_vp.cost.layers.job_plan import chunks_given, plan_of
    from megatron_vp.cost.layers.shapes import Plan
    from megatron_vp.cost.planning.candidates import check_pipeline, placed_heads
    from megatron_vp.cost.planning.own_plan import own_plan
    from megatron_vp.cost.planning.search import BUDGET, Search
    from megatron_vp.cost.planning.variants import Variant, variants
    from megatron_vp.jobs.virtual_stages import layers_given

    given, flagged, refused, tried = None, list[Plan](), "", variants(config, gpus, hardware, keep) if searching else []
    if not tried or not tried[0].settings:
        job = Request.of(config, hardware, gpus, limit).job
        if not searching:
            check_pipeline(job)
            plan_of(config)
            Plan(offload_chunks=int(offload)).check(job)
            tried = [Variant(each, {}) for each in placed_heads(job)]
        try:
            given = job, own_plan(config, job, hardware, limit)
        except UserError as error:
            refused = f"the job as given cannot run: {error}"
        if layers_given(config) is not None:  # Otherwise, the search tries the same layers.
            with suppress(UserError):
                flagged.append(own_plan(config | {"vocab_parallel": True}, job, hardware, limit))
    chunks, progress = chunks_given(config) or 2, progress_lines()
    search = Search(
        tried, hardware, limit, budget or BUDGET, chunks, offload, given, flagged, earlier, config, progress=progress
    )
    return Answer(config, search.run(), search.verdict, searching, refused)


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

    @cached_property
    def request(self) -> Request:
        """The planning request for the recommended run."""
        best = self.verdict.best
        return Request(self.config | dict(best.settings), best.job, self.search.hardware, self.search.limit)

    def settings(self, found: Prediction) -> dict[str, Any]:
        """The settings in which the run `found` differs from the configuration."""
        from megatron_vp.cost.layers.job_plan import settings_of

        changed = {name: value for name, value in found.settings.items() if _changes(self.config.get(name), value)}
        return changed | settings_of(self.config | dict(found.settings), found.plan, found.job)

    def table(self) -> str:
        """The answer as text: first the verdict, then the recommended run next to the given job, then the others."""
        search, verdict, limit = self.search, self.verdict, self.search.limit
        listed = search.found
        if self.searching or search.offload:
            kept = [*search.frontier, verdict.best, verdict.rival]
            listed = [each for each in listed if each in kept or each.given]

        def place(each: Prediction) -> tuple[Any, ...]:
            return each is not verdict.best, not each.given, not each.fits(limit), each.iteration_seconds

        columns = self._columns()
        rows = [[text(each) for text in columns.values()] for each in sorted(listed, key=place)]
        schedules = dict[str, dict[str, None]]()
        for plan, reason in search.impossible:
            schedules.setdefault(reason.partition("; ")[0], {})[plan.schedule] = None
        lines = [
            *(self.sentence(), *self._how_to_run(), "", self.request.title, self.request.job.layers.line),
            *(memory_used(verdict.best, limit), *self._searched(), table([*columns], rows).rstrip(), self._legend()),
            *([self.refused] if self.refused else []),
            *(f"not possible: {reason} ({', '.join(names)})" for reason, names in schedules.items()),
        ]
        return "\n".join([*lines, *self.request.notes, ""])

    def sentence(self) -> str:
        """The verdict in one sentence."""
        verdict, limit = self.verdict, self.search.limit
        rival, ours, answer = verdict.rival, verdict.ours, verdict.answer
        if rival is None:
            return f"{answer}: Megatron itself cannot run this job"
        if ours is rival:
            alone = "with one pipeline stage, there are no ranks to share the vocabulary"
            none = f"no run with megatron_vp fits into {limit / GIB:.4g} GiB"
            return f"{answer}: {alone if ours.job.pipeline == 1 else none}"
        without, saved = f"run without megatron_vp ({self._name(rival)})", rival.peak_memory - ours.peak_memory
        memory = f"{abs(saved) / GIB:.1f} GiB {'less' if saved >= 0 else 'more'} memory"
        if not rival.fits(limit):
            return f"{answer}: {memory} than the smallest {without}, which does not fit into {limit / GIB:.4g} GiB"
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
        search, untried = self.search, self.search.untried
        if not self.searching:
            return []
        lines = [
            f"{len(search.found):,} of {search.count:,} ways to train were simulated; the table has the frontier: runs "
            "that no other run beats in both time and memory"
        ]
        if untried:
            least = seconds(min(option.bound.seconds for option in untried))
            lines.append(
                f"The frontier is partial: {len(untried):,} ways to train, which take at least {least} s per "
                f"iteration, were not tried, because --search-budget {search.budget} was used up"
            )
        return lines

    def _columns(self) -> dict[str, Callable[[Prediction], str]]:
        """The columns of the table: headings, and what is said of a run."""
        columns: dict[str, Callable[[Prediction], str]] = {}
        for name in SIZES if self.searching else ():
            columns[name.replace("_", "\n")] = partial(_size, name)
        columns |= {
            "<schedule": lambda each: each.plan.label,
            "<vocabulary": lambda each: each.plan.title + " *" * each.given,
            "s / iteration": lambda each: seconds(each.iteration_seconds),
            "GiB": lambda each: f"{each.peak_memory / GIB:.1f}",
        }
        if self.search.offload:
            columns["host\nGiB"] = lambda each: f"{max((rank.host for rank in each.copies), default=0) / GIB:.1f}"
        if not self.searching:
            columns["<bound by"] = lambda each: each.bound_by(self.search.limit)
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
                "ours": self.entry(verdict.ours),
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


def _size(name: str, each: Prediction) -> str:
    return str(getattr(each.job, name))
