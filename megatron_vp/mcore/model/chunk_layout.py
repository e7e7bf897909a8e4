"""Places layers where the schedule needs them.

Megatron assigns the segments of `--pipeline-model-parallel-layout` round-robin: on p ranks, chunk c of rank r is
virtual stage c p + r. In a V-shaped schedule, however, the second chunks are placed from the last rank to the first, so
that rank 0 holds both the first and the last stage. The layout string still lists segments in stage order, and
checkpoints and logs record it unchanged. The segments of `--hybrid-layer-pattern` are placed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.mcore.settled import current, process
from megatron_vp.schedule.placement import Placement


class PlacedLayout(PipelineParallelLayerLayout):
    """A layout that follows a placement: every chunk gets the segment of its virtual stage."""

    def __init__(self, layout: str, pipeline_model_parallel_size: int, placement: Placement) -> None:
        super().__init__(layout, pipeline_model_parallel_size)
        # Megatron-Bridge's export copies a configuration's attributes one by one, which fails for frozen dataclasses
        # such as `Placement`. So the layout keeps only the placement's table.
        self._stage_of = placement.stage_of
        self._segments = [row[chunk] for chunk in range(placement.chunks) for row in self.layout]
        self.layout = [[self._segments[stage] for stage in stages] for stages in self._stage_of]

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Count the layers of a type in all stages before a chunk's stage."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        stage = self._stage_of[rank][vp_stage or 0]
        return sum(segment.count(layer_type) for segment in self._segments[:stage])


def even_layout(layers: int, stages: int, further_heads: int) -> str:
    """Megatron's layout string: `layers` spread evenly over `stages`, and `further_heads` MTP layers at the end."""
    return "E" + "|".join("t" * count for count in even_layers(layers, stages)) + "m" * further_heads + "L"


def _placed(original: Callable[..., PipelineParallelLayerLayout]) -> Callable[..., PipelineParallelLayerLayout]:
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        if process.plain or not (settings := current().settings).places_chunks:
            return original(layout, pipeline_model_parallel_size)
        placement = settings.family.placement_of(pipeline_model_parallel_size)
        return PlacedLayout(layout, pipeline_model_parallel_size, placement)

    return from_str


def _placed_segments(original: Callable[..., tuple[list[str], int]]) -> Callable[..., tuple[list[str], int]]:
    def select_pipeline_segment(
        main_pattern: str, pp_group: dist.ProcessGroup, vp_stage: int | None, **options: object
    ) -> tuple[list[str], int]:
        """Return the layer types of the chunk's segment, and the number of layers before this segment."""
        if process.plain or not (settings := current().settings).places_chunks:
            return original(main_pattern, pp_group, vp_stage, **options)
        segments = main_pattern.split("|")
        stage = settings.family.placement_of(pp_group.size()).stage_of[pp_group.rank()][vp_stage or 0]
        return list(segments[stage]), sum(map(len, segments[:stage]))

    return select_pipeline_segment
