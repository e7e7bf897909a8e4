"""Reads from a job's options how many virtual stages per pipeline rank it asks for, and layers outside a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.layout_text import layers_in
from megatron_vp.jobs.pattern_text import pattern_in

ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Options that count a vocabulary layer as one of the layers to divide."""

SHIFTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", *ENDS)
"""Options that give the first or the last stage a different number of layers than the other stages."""

SHIFTED_V = (
    "--pipeline-schedule {pipeline_schedule} with fewer layers in the first or last stage "
    f"({', '.join(map(option_of, SHIFTS))}) is not supported: in a V shape, the first rank holds both of these stages; "
    "use --pipeline-model-parallel-layout with two segments per rank"
)


def chunks_asked(arguments: Mapping[str, Any]) -> int | None:
    """The number of chunks per rank that Megatron derives from a job's arguments, whose keys are long names with
    underscores; None if no argument sets the number.

    A number that does not divide the layers or segments equally is rounded down, because Megatron refuses such jobs.
    Raises UserError if Megatron would not accept the layout or the pattern.
    """
    given, stages = arguments.get, _cut(arguments)
    ranks, chunks = given("pipeline_model_parallel_size") or 1, given("num_virtual_stages_per_pipeline_rank")
    each = given("num_layers_per_virtual_pipeline_stage")
    if chunks is not None:
        return int(chunks)
    if stages is not None:
        return max(1, len(stages) // ranks)
    if each is not None:
        layers = (given("num_layers") or 0) + sum(bool(given(name)) for name in ENDS)
        return max(1, layers // each // ranks)
    return None


def _cut(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The number of layers of each virtual stage, from the bars of the pattern or the layout; None without both."""
    pattern, layout = pattern_in(arguments), arguments.get("pipeline_model_parallel_layout")
    if pattern is not None and pattern.layers is not None:
        return pattern.layers
    return None if layout is None else layers_in(str(layout))


def shifts_given(arguments: Mapping[str, Any]) -> list[str]:
    """The options of SHIFTS that a job sets."""
    return [name for name in SHIFTS if arguments.get(name) not in (None, False)]


def shifted_layers(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The number of layers that each virtual stage gets by Megatron's rules if an option of SHIFTS is set.

    None if no such option is set or the number of layers is unknown. Raises UserError if the layers do not divide.
    """
    given, pattern = arguments.get, pattern_in(arguments)
    layers = given("num_layers") if pattern is None else len(pattern.letters)
    if layers is None or not shifts_given(arguments):
        return None
    ranks, chunks = given("pipeline_model_parallel_size") or 1, chunks_asked(arguments) or 1
    own: dict[int, int] = {
        rank: arguments[name] for rank, name in zip((0, ranks - 1), SHIFTS[:2], strict=True) if given(name) is not None
    }
    ends = [bool(given(name)) for name in ENDS]
    others = (layers + sum(ends) - sum(own.values())) // max(ranks - len(own), 1)
    found = [own.get(stage % ranks, others) // chunks for stage in range(ranks * chunks)]
    found[0] -= ends[0]
    found[-1] -= ends[1]
    if sum(found) != layers or min(found) < 0:
        raise UserError(
            f"{layers} layers cannot be split over {ranks * chunks} stages with "
            f"{' and '.join(map(option_of, shifts_given(arguments)))}: assign the layers to stages with "
            "--pipeline-model-parallel-layout instead"
        )
    return tuple(found)


def layers_given(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The number of layers of each virtual stage, from the bars of the pattern, the layout or the options of SHIFTS.

    None if none of these is given. Raises UserError for a layout that cannot be parsed.
    """
    return _cut(arguments) or shifted_layers(arguments)
