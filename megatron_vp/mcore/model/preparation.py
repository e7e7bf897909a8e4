"""Builds a rank's chunks where the schedule needs them, and prepares them for our schedules.

Chunks come through three doors: Megatron's builders, `get_model` with a script's own `model_provider`, and the
constructor of GPTModel in a script that does not parse Megatron's arguments. Behind each of them, `RankModel.build`
builds the chunks.

`prepare` then splits the vocabulary layers, as late as possible: after the hooks of Megatron's builders, when
`get_model` has a chunk, when Megatron-Bridge prints a model's size, when DistributedDataParallel wraps a chunk, or
before the first iteration. Until then the chunks have Megatron's own layers. Hooks and scripts may load weights into
them, freeze them, or add adapters to layers in between.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import _fork_rng
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.delayed_weights import delaying, leave_out_hooks
from megatron_vp.mcore.model.initial_weights import BuildPlain, plain_start
from megatron_vp.mcore.model.model_check import check_methods, check_model, check_vocabulary_layers
from megatron_vp.mcore.model.split_backward import in_forward
from megatron_vp.mcore.model.surgery import create_pipeline, split_vocabulary
from megatron_vp.mcore.model.whole_vocabulary import WholeLayers
from megatron_vp.mcore.settled import MODEL, OwnLoop, current, process
from megatron_vp.runtime.groups import from_all
from megatron_vp.runtime.iteration import LayerShards
from megatron_vp.vocab.loss import TokenLoss
from megatron_vp.vocab.shards import VocabShards


class RankModel:
    """The chunks of one model on this rank. All ranks of the model build and prepare their chunks in the same order.

    pipeline: this rank's `Pipeline`; None until all chunks are prepared.
    module_offload: the `ModuleOffload` of its iterations; None until there is one.
    rows, shards: with --vocab-parallel, how the vocabulary is divided, and this rank's fields of `LayerShards`.
    whole, shown: the unsharded layers that the export view puts in place of the shards, and whether it is open.
    """

    def __init__(self, groups: ProcessGroupCollection, build_plain: BuildPlain, config: Any) -> None:
        self.job, self.groups = current(), groups
        self.chunks: list[nn.Module] = []
        self.pipeline: Any = None
        self.module_offload: Any = None
        self._prepared = 0
        self.rows: VocabShards | None = None
        self.shards: dict[str, Any] = {}
        self.whole: list[WholeLayers] = []
        self.shown = False
        self._start = plain_start(self.job, groups, build_plain, config)

    def build(self, build: Callable[..., nn.Module]) -> nn.Module:
        """Build the next chunk, given a function of `pre_process` and `post_process`. The placement, not the caller,
        decides whether the chunk is the first or the last stage.
        """
        index, placement = len(self.chunks), self.job.placement
        stage = placement.stage_of[self.groups.pp.rank()][index]
        # Restore the random generators to their state behind the plain chunks.
        with nullcontext() if self._start is None else _fork_rng():
            chunk = build(pre_process=stage == 0, post_process=stage + 1 == placement.stages)
        check_model(chunk)
        self.chunks.append(chunk)
        if self._start is not None and len(self.chunks) == placement.chunks:
            self._start(self.chunks)
        object.__setattr__(chunk, MODEL, self)
        chunk.register_forward_pre_hook(self._refuse_outside_of_passes, prepend=True)
        return chunk

    def _refuse_outside_of_passes(self, chunk: nn.Module, _inputs: tuple[Any, ...]) -> None:
        """Raise UserError if a script itself runs a chunk, which without its vocabulary layers would return hidden
        states instead of losses.

        A script that called get_forward_backward_func before `enable` would use Megatron's own schedule, which assumes
        Megatron's placement of chunks and never runs pass W.
        """
        if not in_forward(chunk):
            raise UserError(
                f"this script runs its {type(chunk).__name__} outside of forward_step or of our schedule: remove that "
                "call, call get_forward_backward_func after megatron_vp.enable, or leave --vocab-parallel out"
            )

    def prepare(self, chunk: nn.Module) -> None:
        """Prepare all chunks up to `chunk` that are not prepared yet. After the last one, connect the ranks."""
        job, groups = self.job, self.groups
        for index in range(self._prepared, self.chunks.index(chunk) + 1):
            each = self.chunks[index]
            leave_out_hooks(each)
            if each.config.cuda_graph_impl == "local" and hasattr(each, "rotary_pos_emb"):
                each.rotary_pos_emb.register_forward_hook(_copied)
            if job.settings.vocab_parallel:
                self._check(each)
                self.whole.append(WholeLayers(each))
                tensor = job.arguments.tensor_model_parallel_size
                self.rows = VocabShards(each.vocab_size, job.placement.ranks * tensor, tensor, job.shards.rows)
                split_vocabulary(self, index)
                self.whole[-1].release()
            self._prepared = index + 1
        # If weights are tied, Megatron's first and last chunks communicate while they are built. Therefore create
        # communicators only after the last chunk is built.
        if self.pipeline is None and self._prepared == job.placement.chunks:
            members = self.rows and job.placement.vocab_members(self.rows.holders)
            self.pipeline = create_pipeline(job, groups, members)

    def _check(self, chunk: nn.Module) -> None:
        """Raise UserError on all ranks of the model if the vocabulary layers of one rank's chunk cannot be split."""
        said = None
        try:
            check_vocabulary_layers(chunk, self.job.arguments.vocab_label_smoothing)
        except UserError as error:
            said = str(error)
        for message in filter(None, from_all(said, self.groups.mp)):
            raise UserError(message)

    def layer_shards(self) -> LayerShards | None:
        """The rank's vocabulary shards, and the token loss that the arguments select; None without --vocab-parallel.

        Raises UserError if a method was replaced since the layers were split.
        """
        if self.rows is None:
            return None
        for chunk in self.chunks:
            check_methods(chunk)  # A script may have replaced them since the model was built.
        args = self.job.arguments
        loss = TokenLoss(args.vocab_label_smoothing, args.vocab_z_loss)
        return LayerShards(self.rows, loss=loss, **self.shards)


def _copied(_rotary: nn.Module, _inputs: tuple[Any, ...], positions: Any) -> Any:
    """Let every forward have its own rotary positions (a tensor, or a tuple that begins with it).

    If all microbatches shared one tensor, Megatron could capture the CUDA graph of a backward only after the graphs of
    all forwards, but a pipeline runs its first backward earlier.
    """
    return (positions[0].clone(), *positions[1:]) if isinstance(positions, tuple) else positions.clone()


def prepare(chunks: Iterable[nn.Module]) -> RankModel | None:
    """Prepare a rank's chunks for our schedules, unless this is already done. The call is collective over all ranks.

    Returns the model of the last of these chunks; None if it was not built through one of the doors. Raises UserError
    if the vocabulary layers of the resulting model cannot be split.
    """
    model: RankModel | None = None
    for chunk in unwrap_model(list(chunks)):
        model = getattr(chunk, MODEL, None)
        if model is not None:
            model.prepare(chunk)
    return model


def _placing(build: Callable[..., nn.Module], groups: ProcessGroupCollection, config: Any) -> Callable[..., nn.Module]:
    """Make `build`, which Megatron calls once for each chunk, build the chunks of a `RankModel`. `config` is the
    configuration that `build` reads, unless it reads Megatron's arguments.
    """
    if _constructing_loop() is not None:
        return build
    if process.plain:
        return lambda *args, **kwargs: _left_plain(build(*args, **kwargs))
    model: RankModel | None = None

    def build_chunk(*args: Any, vp_stage: int | None = None, **kwargs: Any) -> nn.Module:
        nonlocal model
        if not vp_stage:
            model = RankModel(groups, partial(build, *args, **kwargs), config)
        return model.build(partial(build, *args, **kwargs, **({} if vp_stage is None else {"vp_stage": vp_stage})))

    return build_chunk


def _left_plain(chunk: nn.Module) -> nn.Module:
    """Note that Megatron's own schedule runs this chunk, which was built inside `Handle.plain_models`."""
    object.__setattr__(chunk, MODEL, None)
    return chunk


def _constructing_loop() -> OwnLoop | None:
    """The script's own loop, if the constructor of GPTModel places the chunks because no Megatron arguments are parsed;
    None otherwise.
    """
    loop = process.own_loop
    return None if loop is None or loop.reads_arguments() else loop


def _changing(change: Callable[[dict[str, Any]], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a patch that changes the arguments of each call, given by name."""

    @wraps(change)
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            change(given)
            return original(**given)

        return call

    return make


@_changing
def building(given: dict[str, Any]) -> None:
    """Patch `unimodal_build_distributed_models`, through which Megatron's builders build and wrap a rank's chunks."""
    build, hook = given["build_model_func"], given.get("pre_wrap_hook")

    def last_hook(chunks: list[nn.Module]) -> list[nn.Module]:
        chunks = (hook and hook(chunks)) or chunks
        prepare(chunks)
        return chunks

    given["build_model_func"] = _placing(build, given["pg_collection"], build.__self__._model_config)
    given["pre_wrap_hook"] = last_hook


@_changing
def getting_model(given: dict[str, Any]) -> None:
    """Patch Megatron's `get_model`, which builds chunks with a script's own `model_provider`."""
    groups = given.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    build = _placing(given["model_provider_func"], groups, given.get("config"))

    def prepared(*args: Any, **kwargs: Any) -> nn.Module:
        chunk = build(*args, **kwargs)
        prepare([chunk])
        return chunk

    given["model_provider_func"] = prepared


def wrapping(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of DistributedDataParallel: prepare the chunk first, and register no autograd hooks on
    weights of Transformer Engine's layers, because pass W reports their gradients.
    """

    @wraps(original)
    def __init__(self: Any, config: Any, ddp_config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = set(map(id, module.parameters()))
        model = prepare([module])
        if given != set(map(id, module.parameters())):
            kwargs.pop("full_param_layout", None)  # Made of whole layers; without it, the constructor makes a new one.
        splits = model is not None and model.job.settings.splits_backward
        with delaying(ddp_config) if splits else nullcontext():
            original(self, config, ddp_config, module, *args, **kwargs)

    return __init__


def _constructing(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of GPTModel, for scripts that build their chunks without Megatron's builders and
    `get_model`. The job's settings are derived from the model.
    """
    signature = inspect.signature(original)
    model: RankModel | None = None

    @wraps(original)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal model
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        if process.plain:
            with delaying(given["config"], on=False):
                original(self, **given)
            _left_plain(self)
            return
        loop = _constructing_loop()
        if model is not None and len(model.chunks) == model.job.placement.chunks:
            model = None
        job = None if loop is None else loop.settle_for(given) if model is None else model.job
        if job is None or not job.settings.replaces_schedule:
            original(self, **given)
            return
        groups = given["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
        config = given["config"]

        def build_plain(**place: Any) -> nn.Module:
            plain = GPTModel.__new__(GPTModel)
            original(plain, **{**given, "vp_stage": None, **place})
            return plain

        if model is None:
            model = RankModel(groups, build_plain, config)
        if (given["vp_stage"] or 0) != len(model.chunks):
            raise UserError(
                f"the script builds the model with vp_stage={given['vp_stage']} out of order on this rank: build one "
                f"GPTModel per vp_stage, from 0 to {job.placement.chunks - 1}"
            )
        if job.settings.places_chunks:
            # Megatron reads from the configuration which layers a chunk holds, and how many layers come before them.
            config = copy.copy(config)
            layout = job.arguments.pipeline_model_parallel_layout
            config.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(layout, groups.pp.size())

        def build(**ends: bool) -> nn.Module:
            original(self, **{**given, "config": config, **ends})
            # Restore the configuration object that the script passed, because training loops later set functions in
            # it, such as finalize_model_grads_func.
            self.config = given["config"]
            return self

        with delaying(config) if job.settings.splits_backward else nullcontext():
            model.build(build)

    return construct


def _by_stage(original: Callable[..., bool]) -> Callable[..., bool]:
    """Make Megatron-Bridge apply Gemma's softcap on the rank to which the schedule assigns the last stage."""

    @wraps(original)
    def is_pp_last_stage(pp_group: dist.ProcessGroup) -> bool:
        return original(pp_group) if process.plain else dist.get_rank(pp_group) == current().placement.last_rank

    return is_pp_last_stage


def _only_if_plain(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Let only plain models take part in Megatron's synchronization of word embeddings."""
    return lambda self: process.plain and original(self)
