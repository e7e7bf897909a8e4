"""`megatron-vp schedule`: generate or read a schedule, prove that it cannot deadlock, and show it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vp.cli.result_output import format_for, write
from megatron_vp.errors import UserError
from megatron_vp.schedule.families import FAMILIES

if TYPE_CHECKING:
    from megatron_vp.schedule import PassCosts, Schedule, Timeline


OWN_METHODS = [name for name, family in FAMILIES.items() if family.own_method is not None]


class Format(StrEnum):
    """The output formats of the command."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    SVG = "svg"
    PNG = "png"
    HTML = "html"
    PERFETTO = "perfetto"
    PROGRAMS = "programs"


def schedule(
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"Schedule to generate: {', '.join(FAMILIES)}. Omit it if --from is given.",
        ),
    ] = None,
    pipeline_size: Annotated[
        int | None, typer.Option("-p", "--pipeline-size", help="Number of pipeline ranks.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option("-m", "--microbatches", help="Number of microbatches.")] = None,
    vocab: Annotated[
        str,
        typer.Option(
            help=f"Vocabulary method: none, vocab-1 or vocab-2 (the schedule {', '.join(OWN_METHODS)} has its own)."
        ),
    ] = "none",
    vocab_ranks: Annotated[
        str | None,
        typer.Option(help="Ranks that hold vocabulary rows and run vocabulary passes, such as 0,2 (default: all)."),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(help="For interleaved, gis, gis-h and po: number of model chunks per rank (default 2)."),
    ] = None,
    offload_chunks: Annotated[
        str,
        typer.Option(
            help="Number of chunks per rank (or half, or all) whose activations are in host memory between forward and "
            "backward. The chunks whose activations live longest are chosen."
        ),
    ] = "0",
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap-moe-expert-parallel-comm",
            help="For interleaved and dualpipe-v: run a forward and a backward of a rank as one wherever the schedule "
            "pairs them, as training with this option does.",
        ),
    ] = False,
    activation_limit: Annotated[
        str | None,
        typer.Option(
            help="For v-flex: limit on the activations in device memory, in units of one microbatch's activations in "
            "all chunks of a rank. The shortest schedule found within this limit is used."
        ),
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            help="Durations in any unit, such as F=1,B=2. Defaults: F=1, B=1, W=1, S=0.25, T=0.25, IF=0.05, "
            "IB=0.05, comm=0, copy=0. F (forward), B (input gradient) and W (weight gradient) are the times for all "
            "chunks of a rank together. S and T are passes of the output layer. IF and IB are passes of the embedding. "
            "comm is one message or collective. copy moves a rank's activations of one microbatch to host memory or "
            "back."
        ),
    ] = "",
    asked_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Output format (default: the one that the -o file's suffix names, else a table). `html` is a "
            "zoomable web page that shows details of each pass. `programs` is JSON with every instruction that each "
            "rank runs.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the output to this file instead of the screen.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Read the schedule from a JSON file, or from a CSV file in PyTorch's format."),
    ] = None,
    evaluation: Annotated[
        bool,
        typer.Option("--evaluation", help="Show the forward-only schedule that evaluation uses."),
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE",
            help="With --format html: show a second schedule below the first, on the same time axis. SCHEDULE is a "
            "file, or a name, from which a schedule for the same numbers of ranks and microbatches and the same "
            "vocabulary method is generated; a name such as v-half:none sets another method. --cost applies to both "
            "schedules.",
        ),
    ] = None,
) -> None:
    """Generate a pipeline schedule (or read one with --from), prove that it cannot deadlock, and show it.

    Example: megatron-vp schedule v-half -p 8 -m 32 --vocab vocab-2 --format png -o schedule.png
    """
    from megatron_vp.schedule import PassCosts, ScheduleError, family, generate, simulate, validate
    from megatron_vp.schedule import evaluation as forward_schedule
    from megatron_vp.schedule.flex import microbatches_of_limit
    from megatron_vp.schedule.placed_copies import check_offloaded
    from megatron_vp.schedule.request import chunks_to_offload

    output_format = format_for(asked_format, output, Format)
    if compare is not None and output_format is not Format.HTML:
        raise UserError(f"--compare {compare} needs a web page as output: add --format html, or -o FILE.html")
    costs = PassCosts.parse(cost)

    def timed(found: Schedule, check: bool) -> Timeline:
        """Simulate what is shown of a schedule; with `check`, prove it, too."""
        if check:
            validate(found, costs)
        shown = forward_schedule(found, costs) if evaluation else found
        return validate(shown, costs) if check and evaluation else simulate(shown, costs)

    try:
        if source is not None:
            given = {
                "NAME": name,
                "-p": pipeline_size,
                "-m": microbatches,
                "--chunks": chunks,
                "--vocab-ranks": vocab_ranks,
                "--activation-limit": activation_limit,
                "--vocab": None if vocab == "none" else vocab,
                "--offload-chunks": None if offload_chunks == "0" else offload_chunks,
                "--overlap-moe-expert-parallel-comm": overlap or None,
            }
            if clash := [option for option, value in given.items() if value is not None]:
                raise UserError(f"--from {source} already sets the whole schedule; leave out {', '.join(clash)}")
            found = _read(source)
            shown = [timed(found, check=True)]
        else:
            if name is None or pipeline_size is None or microbatches is None:
                raise UserError(
                    "NAME, -p or -m is missing: give -p RANKS, -m MICROBATCHES and NAME, which is one of "
                    f"{', '.join(FAMILIES)}; or give --from FILE"
                )
            limit = None if activation_limit is None else microbatches_of_limit(activation_limit)
            holders = None if vocab_ranks is None else _ranks(vocab_ranks)
            offloaded = chunks_to_offload(offload_chunks, family(name).chunks_of(chunks))
            found = generate(
                name,
                pipeline_size,
                microbatches,
                vocab=vocab,
                chunks=chunks,
                costs=costs,
                vocab_ranks=holders,
                offload_chunks=offloaded,
                overlapped=overlap,
                activation_limit=limit,
            )
            if offloaded:
                check_offloaded(found)
            shown = [timed(found, check=False)]
        if compare is not None:
            second = Path(compare).is_file()
            shown.append(timed(_read(Path(compare)) if second else _compared(compare, found, costs), check=second))
    except ScheduleError as error:
        raise UserError(str(error)) from error
    write(_render(shown, output_format, costs), output)


def _compared(words: str, first: Schedule, costs: PassCosts) -> Schedule:
    """Generate the schedule that `--compare` names, with the sizes of `first`."""
    from megatron_vp.schedule import family, generate
    from megatron_vp.schedule.passes import VocabMethod

    name, _, vocab = words.partition(":")
    alike = VocabMethod.VOCAB_2 if first.vocab is VocabMethod.INTERLACED else first.vocab
    return generate(
        name, first.pipeline_size, first.microbatches, vocab=vocab or family(name).method(alike), costs=costs
    )


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--vocab-ranks {text!r} is not a list of ranks; give numbers such as 0,2") from None


def _read(source: Path) -> Schedule:
    from megatron_vp.schedule.families import schedule_of_text, text_of_file

    return schedule_of_text(str(source), text_of_file(str(source)))


def _render(timelines: Sequence[Timeline], output_format: Format, costs: PassCosts) -> str | bytes:
    from megatron_vp.schedule import draw, lower, programs_to_json, to_csv, to_json, web_page

    timeline = timelines[0]
    match output_format:
        case Format.TABLE:
            return draw.to_text(timeline)
        case Format.HTML:
            return web_page.to_html(timelines)
        case Format.JSON:
            return to_json(timeline.schedule, timeline) + "\n"
        case Format.CSV:
            return to_csv(timeline.schedule)
        case Format.PERFETTO:
            return draw.to_perfetto(timeline) + "\n"
        case Format.PROGRAMS:
            return programs_to_json(timeline.schedule, lower(timeline.schedule, costs)) + "\n"
    picture = draw.to_picture(timeline, output_format.value)
    return picture.decode() if output_format is Format.SVG else picture
