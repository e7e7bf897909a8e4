"""Supports models that a script builds directly from Megatron's GPTModel, without Megatron's builders or `get_model`.

This module is used only after `megatron_vp.enable`, and only if the script does not parse Megatron's arguments. The
patched constructor derives the job's settings from the first model, places each chunk where the schedule needs it, and
prepares the chunk as our builders do.

Megatron-Bridge runs hooks on the finished chunks before wrapping them. The hooks load Hugging Face weights, add
adapters or quantise, and expect unsharded vocabulary layers. The vocabulary layers are therefore split after the hooks.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.delayed_weights import delaying
from megatron_vp.mcore.model.initial_weights import PlainLayout, PlainStart, own_chunk, plain_start
from megatron_vp.mcore.model.model_check import softcap_of
from megatron_vp.mcore.model.surgery import PIPELINE_ATTRIBUTE, prepare_chunk, stage_ends
from megatron_vp.mcore.patches import Patch
from megatron_vp.mcore.settled import SettledJob, current, own_loop


class _OwnModel:
    """The model whose chunks this rank is building."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.first: nn.Module | None = None
        self.start: PlainStart | None = None
        self.built = 0
        """Number of chunks of this model that this rank has built."""
        self.building = False
        """Whether our constructor is running, in which case nested constructor calls go to Megatron unchanged."""
        self.hooks_follow = False
        """Whether one of Megatron's builders is running. A builder calls hooks after it has built all chunks."""
        self.uncut: ProcessGroupCollection | None = None
        """Process groups of chunks whose vocabulary layers will be split after the hooks have run; None if no split is
        pending.
        """


_model = _OwnModel()


def _preparing(original: Callable[..., None]) -> Callable[..., None]:
    _model.clear()  # A failed construction may have left state behind.
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        loop, model = own_loop(), _model
        if model.building or loop is None or loop.reads_arguments():
            original(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        model.building = True
        try:
            job = loop.settle_for(given)
            if job.settings.replaces_schedule:
                _construct(original, model, self, given, job)
            else:
                original(self, *args, **kwargs)
        finally:
            model.building = False
        if job.args.core_attention == "sdpa" and any(type(each) is DotProductAttention for each in self.modules()):
            raise UserError(
                "core_attention='sdpa' has no effect, because this script made the model's layer specification before "
                "megatron_vp.enable was called: call enable first"
            )

    return construct


def _construct(
    original: Callable[..., None], model: _OwnModel, chunk: nn.Module, given: Mapping[str, Any], job: SettledJob
) -> None:
    if type(chunk) is not GPTModel:
        raise UserError(
            f"the script builds a {type(chunk).__name__}, but megatron_vp.enable supports only Megatron's GPTModel: "
            "build a GPTModel, or build the model through Megatron's get_model"
        )
    groups = given["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
    index, config = given["vp_stage"] or 0, given["config"]
    if softcap_of(config) and job.placement.chunk_of(job.placement.stages - 1) + 1 != job.placement.chunks:
        raise UserError(
            f"--pipeline-schedule {job.args.pipeline_schedule} does not place the last stage in the last chunk of its "
            "rank, but Megatron-Bridge caps this model's logits in that chunk: use a schedule that does"
        )
    if index != model.built:
        raise UserError(
            f"the script builds the model with vp_stage={index} out of order on this rank: build one GPTModel per "
            f"vp_stage, from 0 to {job.placement.chunks - 1}"
        )

    def plain_chunk(layout: PlainLayout, place: dict[str, Any]) -> nn.Module:
        return GPTModel(**{**given, "config": layout.of_model(config), "vp_stage": None, **place})

    if not index:
        model.start = plain_start(job, groups, plain_chunk)
    if job.settings.places_chunks:
        # Megatron reads from the configuration which layers a chunk holds, and how many layers come before them.
        config = copy.copy(config)
        layout = job.args.pipeline_model_parallel_layout
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(layout, groups.pp.size())
    splits = job.settings.splits_backward
    with own_chunk(model.start), delaying(config) if splits else nullcontext():
        original(chunk, **{**given, "config": config, **stage_ends(job, groups.pp, index)})
    # Restore the configuration object that the script passed, because training loops later set functions in it, such as
    # finalize_model_grads_func.
    chunk.config = given["config"]
    model.first = model.first if index else chunk
    # A configuration with this method is a model provider of Megatron-Bridge.
    if model.hooks_follow or hasattr(config, "provide_distributed_model"):
        model.uncut = groups
        if model.start is not None:
            model.start.fill(chunk, index, job.placement)
    else:
        _cut(job, chunk, model.first, groups, index, model.start)
    model.built += 1
    if model.built == job.placement.chunks:
        model.first, model.start, model.built = None, None, 0


def cut_after_hooks(chunks: Sequence[nn.Module]) -> None:
    """Prepare a rank's chunks for our schedules, unless this is already done. Call this function after all hooks that
    may change the chunks, such as Megatron's `pre_wrap_hook`.

    The call is collective over all ranks. Raises UserError if the vocabulary layers of the resulting model cannot be
    split.
    """
    if _model.uncut is None:
        return
    groups, _model.uncut = _model.uncut, None
    for index, chunk in enumerate(chunks):
        _cut(current(), chunk, chunks[0], groups, index, None)


def _cut(
    job: SettledJob,
    chunk: nn.Module,
    first: nn.Module,
    groups: ProcessGroupCollection,
    index: int,
    start: PlainStart | None,
) -> None:
    prepare_chunk(job, chunk, first, groups, index, start)
    chunk.register_forward_pre_hook(functools.partial(_refuse_outside_of_schedule, first), prepend=True)


def _cutting_after_hooks(original: Callable[..., list[nn.Module]]) -> Callable[..., list[nn.Module]]:
    """Wrap `unimodal_build_distributed_models`, so that `cut_after_hooks` runs after the caller's `pre_wrap_hook`."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> list[nn.Module]:
        bound = signature.bind(*args, **kwargs)
        hook = bound.arguments.get("pre_wrap_hook")

        def last_hook(chunks: list[nn.Module]) -> list[nn.Module]:
            chunks = (hook and hook(chunks)) or chunks
            cut_after_hooks(chunks)
            return chunks

        bound.arguments["pre_wrap_hook"] = last_hook
        _model.hooks_follow = True
        try:
            return original(*bound.args, **bound.kwargs)
        finally:
            _model.hooks_follow = False

    return build


def _cutting_before_count(original: Callable[..., None]) -> Callable[..., None]:
    """Split the vocabulary layers just before Megatron-Bridge prints a model's size, because all hooks have run by then
    and no chunk is wrapped yet.
    """

    @functools.wraps(original)
    def print_num_params(model: list[nn.Module], pg_collection: ProcessGroupCollection) -> None:
        cut_after_hooks(model)
        original(model, pg_collection)

    return print_num_params


def _refuse_outside_of_schedule(first: nn.Module, _chunk: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """Pre-forward hook that raises UserError if a prepared chunk runs outside our schedules.

    A script that called get_forward_backward_func before `enable` would use Megatron's own schedule, which assumes
    Megatron's placement of chunks and never runs pass W.
    """
    pipeline = getattr(first, PIPELINE_ATTRIBUTE, None)
    if pipeline is None or pipeline.progress.instruction is None:
        raise UserError(
            "this script runs its model outside of the schedule that megatron_vp.enable selected: call "
            "get_forward_backward_func after enable, and run the model only in forward_step"
        )


def _by_stage(original: Callable[..., bool]) -> Callable[..., bool]:
    """Make Megatron-Bridge apply Gemma's softcap on the rank to which the schedule assigns the last stage."""

    @functools.wraps(original)
    def is_pp_last_stage(pp_group: dist.ProcessGroup) -> bool:
        return dist.get_rank(pp_group) == current().placement.last_rank

    return is_pp_last_stage


PATCHES = (
    Patch(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        _preparing,
        "place or shard the vocabulary layers of models that a script builds without Megatron's builders",
    ),
    *(
        Patch(
            f"megatron.training.models.{module}:unimodal_build_distributed_models",
            _cutting_after_hooks,
            "shard vocabulary layers only after hooks have loaded weights or changed layers",
        )
        for module in ("gpt", "hybrid")
    ),
)

BRIDGE_PATCHES = (
    Patch(
        "megatron.bridge.models.model_provider:_print_num_params",
        _cutting_before_count,
        "shard vocabulary layers of Megatron-Bridge's models only after hooks have loaded weights or changed layers",
    ),
    Patch(
        "megatron.bridge.models.gemma.gemma2_provider:is_pp_last_stage",
        _by_stage,
        "apply Gemma's softcap to the output layer, which V-shaped schedules place on the first rank",
    ),
)
