"""`megatron-vp plan --search`: choose a job's parallel sizes for a given number of GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vp.cli.memory_room import memory_room
from megatron_vp.cli.planning import GIB, Format, Request, gains, how_to_run, seconds, table, what_to_set
from megatron_vp.cli.result_output import progress_bar, write
from megatron_vp.errors import UserError

if TYPE_CHECKING:
    from megatron_vp.cost.hardware.gpus import Hardware
    from megatron_vp.cost.planning.evaluation import Evaluation
    from megatron_vp.cost.planning.planner import Choice
    from megatron_vp.cost.planning.search import Search
    from megatron_vp.jobs.job_config import JobConfig

SHOWN = 12
"""The table shows at most this many runs of the frontier; JSON and the picture show all."""


@dataclass(frozen=True)
class Answer:
    """The results of a search on `gpus` GPUs with at most `limit` bytes of memory each."""

    config: JobConfig
    hardware: Hardware
    gpus: int
    limit: float
    search: Search
    choice: Choice
    """The recommended run, and the runs with which it is compared."""

    def request(self, found: Evaluation) -> Request:
        """The planning request for the job with the parallel sizes of the run `found`."""
        variant = self.search.variants[found.variant]
        config = replace(self.config, values=self.config.values | variant.settings)
        return Request(config, variant.job, self.hardware, self.limit)

    def settings(self, found: Evaluation) -> dict[str, object]:
        """The settings in which the run `found` differs from the configuration."""
        from megatron_vp.cost.sizes.job_plan import settings_of

        request = self.request(found)
        sizes = self.search.variants[found.variant].settings
        changed = {name: value for name, value in sizes.items() if _changes(self.config.values.get(name), value)}
        return changed | settings_of(request.config, found.candidate.plan, request.job)

    def sizes(self, found: Evaluation) -> dict[str, Any]:
        """The sizes of the run `found` that a search varies, and its data-parallel size."""
        job = self.search.variants[found.variant].job
        names = ("tensor", "context", "pipeline", "data", "expert", "micro_batch", "recompute")
        return {name: getattr(job, name) for name in names}

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
        if not found.untried:
            return "The frontier: runs that no other run beats in both time and memory."
        fastest = found.fitting(self.limit)[0].iteration_seconds
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
    gpus: int | None,
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

    if gpus is None:
        raise UserError("--search needs the size of the cluster: give the number of nodes with --nodes")
    for name in keep:
        if name not in DIMENSIONS:
            raise UserError(f"--keep {name} is not a setting that --search varies; use {', '.join(DIMENSIONS)}")
    tried = variants(config.values, gpus, hardware, keep)
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
    answer = _answer(config, hardware, gpus, limit, found)
    match output_format:
        case Format.TABLE:
            content: str | bytes = _table(answer)
        case Format.JSON:
            content = json.dumps(_document(answer), indent=1) + "\n"
        case Format.PNG:
            content = search_chart(found, limit, f"{answer.title}\n{answer.heading}")
    write(content, output)


def _answer(config: JobConfig, hardware: Hardware, gpus: int, limit: float, found: Search) -> Answer:
    """From the runs that tie for fastest, choose the simplest run that training accepts."""
    from megatron_vp.cost.planning.candidates import refusal
    from megatron_vp.cost.planning.planner import compared
    from megatron_vp.cost.planning.ties import tie_of

    def accepted(each: Evaluation) -> bool:
        return refusal(config.values | found.variants[each.variant].settings, each.candidate.plan) is None

    tied, others = found.tied(limit, tie_of(found.variants[0].job, hardware).share), found.without_split(limit)
    chosen = next(filter(accepted, tied), tied[0])
    return Answer(config, hardware, gpus, limit, found, compared(chosen, tied, others, accepted))


def _table(answer: Answer) -> str:
    from megatron_vp.cost.planning.front import thinned

    search, chosen = answer.search, answer.choice.chosen
    headings = ["tensor", "context", "pipeline", "data", "expert", "micro\nbatch", "<recompute", "<schedule"]
    shown = thinned(search.frontier(answer.limit), SHOWN)
    if chosen not in shown:
        shown = sorted([*shown, chosen], key=lambda each: each.iteration_seconds)
    rows = [
        (
            *map(str, answer.sizes(each).values()),
            each.candidate.plan.label,
            each.candidate.method + (", balanced" if each.candidate.plan.vocab_rows else ""),
            seconds(each.iteration_seconds),
            f"{each.tokens_per_second / answer.gpus:,.0f}",
            f"{100 * each.mfu:.1f}",
            f"{each.peak_memory / GIB:.1f}",
        )
        for each in shown
    ]
    request = answer.request(chosen)
    lines = [
        answer.title,
        answer.heading,
        table([*headings, "<vocabulary", "s / iteration", "tokens / s\nper GPU", "MFU %", "GiB"], rows),
        *_counts(answer),
        *_gains(answer),
        *memory_room(request, chosen, searched=True),
        *request.notes,
    ]
    return "\n".join([*lines, *how_to_run(answer.settings(chosen), request, answer.choice)])


def _counts(answer: Answer) -> list[str]:
    from megatron_vp.cost.planning.ties import tie_of

    found, fastest = answer.search, answer.search.fitting(answer.limit)[0]
    lines = [
        f"{found.count:,} ways to train: {len(found.found):,} simulated, {found.too_large:,} too large for memory, "
        f"{found.dominated:,} no better than a simulated one"
        + (f", {found.untried:,} not tried" if found.untried else "")
    ]
    if found.offload_sizes is not None:
        away = sum(1 for each in found.found if each.candidate.plan.offload_chunks)
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
    if answer.choice.chosen is not fastest:
        slower = answer.choice.chosen.iteration_seconds / fastest.iteration_seconds - 1
        tie = tie_of(found.variants[0].job, answer.hardware)
        lines.append(
            f"the recommended run is {100 * slower:.1f} % slower than the fastest run, but is simpler or leaves "
            f"more memory free; differences up to {tie.text} count as a tie"
        )
    return lines


def _gains(answer: Answer) -> list[str]:
    """Lines that compare the recommended run with others; see `planning.gains`."""

    def name(each: Evaluation) -> str:
        chosen = answer.sizes(answer.choice.chosen)
        changed = [_said(size, value) for size, value in answer.sizes(each).items() if value != chosen[size]]
        return f"{each.candidate.name}, " + (f"with {', '.join(changed)}" if changed else "at the same sizes")

    return gains(answer.choice, name)


def _said(size: str, value: object) -> str:
    return f"{size.replace('_', ' ')} {value}"


def _document(answer: Answer) -> dict[str, object]:
    def entry(each: Evaluation) -> dict[str, object]:
        return answer.sizes(each) | each.document(answer.limit) | what_to_set(answer.settings(each))

    choice = answer.choice
    found = answer.search
    return {
        "hardware": answer.hardware.name,
        "gpus": answer.gpus,
        "limit_bytes": answer.limit,
        "best": entry(choice.chosen),
        "frontier": [*map(entry, found.frontier(answer.limit))],
        "without_split": choice.without_split and entry(choice.without_split),
        "gain": choice.gain,
        "in_megatron": choice.in_megatron and entry(choice.in_megatron),
        "gain_over_megatron": choice.gain_over_megatron,
        "combinations": found.count,
        "simulated": len(found.found),
        **{name: getattr(found, name) for name in ["too_large", "dominated", "untried"]},
        "untried_seconds": found.untried_seconds if found.untried else None,
        **{name: getattr(found, name) for name in ["budget", "offload_sizes", "likely"]},
        "partial": found.untried > 0,
        "heading": answer.heading,
        "note": answer.request(choice.chosen).caveat,
    }
