"""Reads from a job's options how many virtual stages per pipeline rank the job asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_vp.jobs.layout_text import stages_in
from megatron_vp.jobs.pattern_text import pattern_in

ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def chunks_asked(arguments: Mapping[str, Any]) -> int | None:
    """The number of chunks per rank that Megatron derives from a job's arguments, whose keys are long names with
    underscores; None if no argument sets the number.

    A number that does not divide the layers or segments equally is rounded down, because Megatron refuses such jobs.
    Raises UserError if Megatron would not accept the layout or the pattern.
    """
    given = arguments.get
    ranks, pattern = given("pipeline_model_parallel_size") or 1, pattern_in(arguments)
    chunks, each = given("num_virtual_stages_per_pipeline_rank"), given("num_layers_per_virtual_pipeline_stage")
    layout = given("pipeline_model_parallel_layout")
    if chunks is not None:
        return int(chunks)
    if pattern is not None:
        return None if pattern.layers is None else max(1, len(pattern.layers) // ranks)
    if layout is not None:
        return max(1, stages_in(str(layout)) // ranks)
    if each is not None:
        layers = (given("num_layers") or 0) + sum(bool(given(name)) for name in ENDS)
        return max(1, layers // each // ranks)
    return None
