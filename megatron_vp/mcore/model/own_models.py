"""Models that a script makes by itself, with Megatron's GPTModel and neither its builders nor its `get_model`.

Only after `megatron_vp.enable`, and only where Megatron's own arguments have settled no job. The constructor then
settles the job from the first model, places the chunk as the schedule does, and prepares it as our builders do.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.initial_weights import PlainLayout, PlainStart, own_chunk, plain_start
from megatron_vp.mcore.model.surgery import PIPELINE_ATTRIBUTE, prepare_chunk, stage_ends
from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.settled import SettledJob, own_loop


class _OwnModel:
    """The model whose chunks this rank builds now."""

    first: nn.Module | None = None
    start: PlainStart | None = None
    building: bool = False
    """A constructor of ours runs: those that it calls are Megatron's."""


def _preparing(original: Callable[..., None]) -> Callable[..., None]:
    model, signature = _OwnModel(), inspect.signature(original)

    @functools.wraps(original)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        loop = own_loop()
        if model.building or loop is None or loop.reads_arguments():
            original(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        model.building = True
        try:
            _construct(original, model, self, given, loop.settle_for(given))
        finally:
            model.building = False

    return construct


def _construct(
    original: Callable[..., None], model: _OwnModel, chunk: nn.Module, given: Mapping[str, Any], job: SettledJob
) -> None:
    if type(chunk) is not GPTModel:
        raise UserError(
            f"megatron_vp.enable prepares models of Megatron's GPTModel, the script builds a {type(chunk).__name__}: "
            f"build a GPTModel, or build it through Megatron's get_model"
        )
    groups = given["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
    index, config = given["vp_stage"] or 0, given["config"]
    if (index == 0) != (model.first is None):
        raise UserError(
            f"the script builds chunk {index} of a rank with {job.placement.chunks}, where chunk "
            f"{0 if index else 1} is due: build the chunks of a model in order, one GPTModel per vp_stage"
        )

    def plain_chunk(layout: PlainLayout, place: dict[str, Any]) -> nn.Module:
        return GPTModel(**{**given, "config": layout.of_model(config), "vp_stage": None, **place})

    if not index:
        model.start = plain_start(job, groups, plain_chunk)
    if job.settings.places_chunks:
        # Megatron looks up in it which layers a chunk holds, and how many come before.
        config = copy.copy(config)
        layout = job.args.pipeline_model_parallel_layout
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(layout, groups.pp.size())
    with own_chunk(model.start):
        original(chunk, **{**given, "config": config, **stage_ends(job, groups.pp, index)})
    # Loops set functions in the configuration that they have made, such as finalize_model_grads_func.
    chunk.config = given["config"]
    model.first = model.first if index else chunk
    prepare_chunk(job, chunk, model.first, groups, index, model.start)
    chunk.register_forward_pre_hook(functools.partial(_refuse_outside_of_schedule, model.first), prepend=True)
    if index + 1 == job.placement.chunks:
        model.first = model.start = None


def _refuse_outside_of_schedule(first: nn.Module, _chunk: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """A hook before the forward of a prepared chunk; `first` is its rank's first one. Raises UserError.

    What Megatron's getter returned before `enable` runs Megatron's schedule, which would compute on chunks that are
    placed otherwise, and leave out the weight gradients that a W of ours computes.
    """
    pipeline = getattr(first, PIPELINE_ATTRIBUTE, None)
    if pipeline is None or pipeline.progress.instruction is None:
        raise UserError(
            "this script runs its model outside of the schedules of megatron_vp.enable: call "
            "get_forward_backward_func after enable, and the model in forward_step alone"
        )


PATCHES = (
    Patch(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        _preparing,
        "place or shard the vocabulary layers of models that a script makes without Megatron's builders",
        "(self, config, transformer_layer_spec, vocab_size, max_sequence_length, pre_process=True, post_process=True, "
        "fp16_lm_cross_entropy=False, parallel_output=True, share_embeddings_and_output_weights=False, "
        "position_embedding_type='learned_absolute', rotary_percent=1.0, rotary_base=10000, rope_scaling=False, "
        "rope_scaling_factor=8.0, scatter_embedding_sequence_parallel=True, seq_len_interpolation_factor=None, "
        "mtp_block_spec=None, pg_collection=None, vp_stage=None)",
    ),
)
"""Applied by `megatron_vp.enable`."""
