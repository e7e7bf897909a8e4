"""`megatron-vp plan --search`: choose a job's parallel sizes for a given number of GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vp.cli.memory_room import memory_room
from megatron_vp.cli.plan_check import UNCHECKED, Ask, can_check, megatrons_check, refusal
from megatron_vp.cli.planning import GIB, Format, Request, gains, how_to_run, rendered, seconds, what_to_set
from megatron_vp.cli.result_output import progress_bar, write
from megatron_vp.errors import UserError

if TYPE_CHECKING:
    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.planning.evaluation import Evaluation
    from megatron_vp.cost.planning.search import Found, Search
    from megatron_vp.cost.sizes.shapes import Job
    from megatron_vp.jobs.job_config import JobConfig

SHOWN = 12
"""The table shows at most this many runs of the frontier; JSON and the picture show all."""

MOST_REFUSED = 20
"""If training refuses this many runs in a row, the job itself is taken to be the cause."""


@dataclass(frozen=True)
class Answer:
    """The recommended run, and all results of a search on `gpus` GPUs with at most `limit` bytes of memory each."""

    config: JobConfig
    hardware: Hardware
    gpus: int
    limit: float
    search: Search
    chosen: Found
    refused: Sequence[tuple[Found, str]]
    """Runs that would have been preferred to `chosen`, but that training would refuse, with the reasons."""
    note: str | None
    """A note that is printed with the recommendation."""
    without_split: Found | None = None
    """The fastest run without vocabulary parallelism that fits and that training accepts."""
    in_megatron: Found | None = None
    """The fastest run that Megatron itself supports, that fits and that training accepts."""

    def request(self, found: Found) -> Request:
        """The planning request for the job with the parallel sizes of the run `found`."""
        variant = self.search.variants[found.variant]
        config = replace(self.config, values=self.config.values | variant.settings)
        return Request(config, variant.job, self.hardware, self.limit)

    def settings(self, found: Found) -> dict[str, object]:
        """The settings in which the run `found` differs from the configuration."""
        from megatron_vp.cost.sizes.job_plan import settings_of

        request = self.request(found)
        sizes = self.search.variants[found.variant].settings
        changed = {name: value for name, value in sizes.items() if _changes(self.config.values.get(name), value)}
        return changed | settings_of(request.config, found.evaluation.candidate.plan, request.job)

    @property
    def others(self) -> tuple[Evaluation | None, Evaluation | None]:
        """The evaluations of `without_split` and `in_megatron`."""
        without_split, in_megatron = self.without_split, self.in_megatron
        return (
            None if without_split is None else without_split.evaluation,
            None if in_megatron is None else in_megatron.evaluation,
        )

    @property
    def title(self) -> str:
        """One line with the GPUs, the number of ways to train, the tokens per iteration and the vocabulary."""
        job = self.search.variants[0].job
        batch = job.microbatches * job.micro_batch * job.data
        return (
            f"{self.gpus} x {self.hardware.title}: {self.search.count:,} ways to train with {batch} x {job.sequence} "
            f"tokens per iteration, vocabulary {self.config.values.get('vocab_size') or job.model.vocab}"
        )

    @property
    def heading(self) -> str:
        """One line that explains the frontier and says which runs may be missing from it."""
        found = self.search
        if not found.partial:
            return "The frontier: runs that no other run beats in both time and memory."
        fastest = found.fitting(self.limit)[0].seconds
        return (
            f"The frontier is partial: {found.untried:,} ways to train were not tried, "
            + ("possibly including the fastest" if found.untried_seconds <= fastest else "none of which is the fastest")
            + f" (each takes at least {seconds(found.untried_seconds)} s per iteration); {found.likely or 'none'} of "
            f"them probably belong to the frontier. All simulations of --search-budget {found.budget} were used; a "
            "larger budget allows more."
        )


def _changes(own: object, value: object) -> bool:
    return (own or None) != (value or None) and not (value == 1 and own is None)


def search_job(
    config: JobConfig,
    hardware: Hardware,
    gpus: int,
    limit: float,
    keep: Sequence[str],
    budget: int | None,
    offload: bool,
    output_format: Format,
    output: Path | None,
) -> None:
    """Search for the best parallel sizes of a job, and write the result. Raises UserError."""
    from megatron_vp.cost.planning.charts import search_chart
    from megatron_vp.cost.planning.search import BUDGET, search
    from megatron_vp.cost.planning.variants import DIMENSIONS, variants
    from megatron_vp.cost.sizes.job_plan import chunks_given

    for name in keep:
        if name not in DIMENSIONS:
            raise UserError(f"--keep {name} is not a setting that --search varies; use {', '.join(DIMENSIONS)}")
    tried = variants(config.values, gpus, hardware, keep)
    with megatrons_check() as check:
        with progress_bar() as bar:
            tasks: dict[str, int] = {}

            def progress(what: str, done: int, of: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=of)
                bar.update(tasks[what], completed=done, total=of)

            chunks = chunks_given(config) or 2
            found = search(
                tried, hardware, limit, budget=budget or BUDGET, chunks=chunks, progress=progress, offload=offload
            )
        answer = _chosen(config, hardware, gpus, limit, found, check)
    match output_format:
        case Format.TABLE:
            content: str | bytes = _table(answer)
        case Format.JSON:
            content = json.dumps(_document(answer), indent=1) + "\n"
        case Format.PNG:
            content = search_chart(found, limit, f"{answer.title}\n{answer.heading}")
    write(content, output)


def _chosen(config: JobConfig, hardware: Hardware, gpus: int, limit: float, found: Search, ask: Ask) -> Answer:
    """From the runs that tie for fastest, choose the simplest run that training accepts."""
    from megatron_vp.cost.planning.ties import tie_of

    tied = found.tied(limit, tie_of(found.variants[0].job, hardware).share)
    answer = Answer(config, hardware, gpus, limit, found, tied[0], (), None)
    if not can_check():
        return _compared(replace(answer, note=UNCHECKED), lambda each: True)

    def why_not(each: Found) -> str | None:
        return refusal(answer.request(each), each.evaluation.candidate.plan, ask)

    refused: list[tuple[Found, str]] = []
    for each in tied[:MOST_REFUSED]:
        reason = why_not(each)
        if reason is None:
            return _compared(replace(answer, chosen=each, refused=refused), lambda each: why_not(each) is None)
        refused.append((each, reason))
    note = f"training would refuse this run, like all others that were tried: {refused[0][1]}"
    return _compared(replace(answer, note=note), lambda each: True)


def _compared(answer: Answer, accepts: Callable[[Found], bool]) -> Answer:
    """Add the runs with which the recommended run is compared."""
    found = answer.search.without_split(answer.limit)
    without_split = next(filter(accepts, found), None)
    own = (each for each in found if each.evaluation.candidate.in_megatron)
    return replace(answer, without_split=without_split, in_megatron=next(filter(accepts, own), None))


def _row(answer: Answer, found: Found) -> list[str]:
    job, plan = answer.search.variants[found.variant].job, found.evaluation.candidate.plan
    sizes = (job.tensor, job.context, job.pipeline, job.data, job.expert, job.micro_batch)
    return [
        *map(str, sizes),
        job.recompute.value,
        plan.label,
        found.evaluation.candidate.method + (", balanced" if plan.vocab_rows else ""),
        seconds(found.seconds),
        f"{found.evaluation.tokens_per_second / answer.gpus:,.0f}",
        f"{100 * found.evaluation.mfu:.1f}",
        f"{found.memory / GIB:.1f}",
    ]


def _table(answer: Answer) -> str:
    from rich.table import Table

    from megatron_vp.cost.planning.planner import gain_over

    table = Table()
    for heading in ("tensor", "context", "pipeline", "data", "expert", "micro batch"):
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for heading in ("recompute", "schedule", "vocabulary"):
        table.add_column(heading, no_wrap=True)
    for heading in ("s / iteration", "tokens / s\nper GPU", "MFU %", "GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    frontier = answer.search.frontier(answer.limit)
    shown = frontier if len(frontier) <= SHOWN else _thinned(frontier)
    if answer.chosen not in shown:
        shown = sorted([*shown, answer.chosen], key=lambda each: each.seconds)
    for each in shown:
        table.add_row(*_row(answer, each), style="bold" if each is answer.chosen else None)
    settings = answer.settings(answer.chosen)
    lines = [answer.title, answer.heading, rendered(table)]
    lines += _counts(answer)
    lines += _gains(answer)
    lines += memory_room(answer.request(answer.chosen), answer.chosen.evaluation, searched=True)
    lines += answer.request(answer.chosen).notes
    for each, reason in answer.refused:
        sizes = _sizes(answer.search.variants[each.variant].job)
        run = ", ".join([*(f"{size} {value}" for size, value in sizes.items()), each.evaluation.candidate.name])
        lines.append(f"not possible: {run}: {reason}")
    lines += [answer.note] if answer.note else []
    chosen = answer.chosen.evaluation
    gain = None if chosen.candidate.without_split else gain_over(answer.others[0], chosen)
    return "\n".join([*lines, *how_to_run(settings, answer.request(answer.chosen), gain)])


def _thinned(frontier: list[Found]) -> list[Found]:
    """Select SHOWN evenly spaced runs of the frontier, including the first and the last."""
    last = len(frontier) - 1
    return [frontier[round(place * last / (SHOWN - 1))] for place in range(SHOWN)]


def _counts(answer: Answer) -> list[str]:
    from megatron_vp.cost.planning.ties import tie_of

    found, fastest = answer.search, answer.search.fitting(answer.limit)[0]
    lines = [
        f"{found.count:,} ways to train: {len(found.found):,} simulated, {found.too_large:,} too large for memory, "
        f"{found.dominated:,} no better than a simulated one"
        + (f", {found.untried:,} not tried" if found.untried else "")
    ]
    if found.offload_sizes is not None:
        away = sum(1 for each in found.found if each.evaluation.candidate.plan.offload_chunks)
        lines.append(
            f"offloading of activations to host memory: tried with {found.offload_sizes} combinations of parallel "
            f"sizes, {away} runs simulated"
            + (
                ""
                if away
                else "; offloading needs a pipeline without recomputation, enough host memory, and passes that take "
                "longer than the copies"
            )
        )
    if answer.chosen is not fastest:
        slower = answer.chosen.seconds / fastest.seconds - 1
        tie = tie_of(found.variants[0].job, answer.hardware)
        lines.append(
            f"the recommended run is {100 * slower:.1f} % slower than the fastest run, but is simpler or leaves "
            f"more memory free; differences up to {tie.text} count as a tie"
        )
    return lines


def _gains(answer: Answer) -> list[str]:
    """Lines that compare the recommended run with the runs in `answer.others`; see `planning.gains`."""
    runs = [each for each in (answer.without_split, answer.in_megatron) if each is not None]

    def name(evaluation: Evaluation) -> str:
        found = next(each for each in runs if each.evaluation is evaluation)
        sizes, chosen = (_sizes(answer.search.variants[each.variant].job) for each in (found, answer.chosen))
        changed = [f"{size} {value}" for size, value in sizes.items() if value != chosen[size]]
        return f"{evaluation.candidate.name}, " + (f"with {', '.join(changed)}" if changed else "at the same sizes")

    return gains(answer.chosen.evaluation, *answer.others, name)


def _sizes(job: Job) -> dict[str, int | str]:
    """The values of `job` in the table's first columns, by column title."""
    names = ("tensor", "context", "pipeline", "data", "expert", "micro_batch", "recompute")
    return {name.replace("_", " "): getattr(job, name) for name in names}


def _document(answer: Answer) -> dict[str, object]:
    from megatron_vp.cost.planning.planner import gain_over

    frontier = answer.search.frontier(answer.limit)
    without_split, in_megatron = answer.others

    def entry(found: Found) -> dict[str, object]:
        job, settings = answer.search.variants[found.variant].job, answer.settings(found)
        return {
            "tensor": job.tensor,
            "context": job.context,
            "pipeline": job.pipeline,
            "data": job.data,
            "expert": job.expert,
            "micro_batch": job.micro_batch,
            "recompute": job.recompute,
            **found.evaluation.document(answer.limit),
            **what_to_set(settings),
        }

    found = answer.search
    return {
        "hardware": answer.hardware.name,
        "gpus": answer.gpus,
        "limit_bytes": answer.limit,
        "best": entry(answer.chosen),
        "frontier": [entry(each) for each in frontier],
        "without_split": answer.without_split and entry(answer.without_split),
        "gain": gain_over(without_split, answer.chosen.evaluation),
        "in_megatron": answer.in_megatron and entry(answer.in_megatron),
        "gain_over_megatron": gain_over(in_megatron, answer.chosen.evaluation),
        "combinations": found.count,
        "simulated": len(found.found),
        "too_large": found.too_large,
        "dominated": found.dominated,
        "untried": found.untried,
        "untried_seconds": found.untried_seconds if found.partial else None,
        "budget": found.budget,
        "offload_sizes": found.offload_sizes,
        "likely": found.likely,
        "partial": found.partial,
        "heading": answer.heading,
        "check": answer.note,
        "note": answer.request(answer.chosen).caveat,
    }
