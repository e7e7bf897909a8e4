"""Gives a fresh run the initial weights that plain Megatron would have on the same ranks.

Megatron initialises the weights rank by rank: every pipeline rank seeds its generators with the job's seed + 100 x its
rank, then builds its stage. Layers that a schedule moves to other ranks, as V-shaped schedules do, would get different
initial weights.

Each rank therefore first builds the chunks that plain Megatron would build on this rank, with Megatron's own code and
generators. Our chunks are built afterwards and copy the weights by name. In these names, layers are numbered within the
whole model. Values that another rank holds are broadcast. The method works for every layer that draws its weights in
its constructor. The extra cost arises only at startup, when each rank builds and briefly holds the plain chunks in
addition to ours.

Plain Megatron follows the user's layout if there is one, and divides the model evenly otherwise. If our schedule places
chunks as Megatron does, the plain run has the same number of chunks per rank. If our schedule places chunks
differently, the plain run has one stage per rank. Each plain stage then consists of v consecutive stages of ours, where
v is the number of our chunks per rank. If the layers are divided evenly over our stages, they are divided evenly over
the plain stages too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import batched, chain, product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from torch import nn

from megatron_vp.jobs.layout_text import even_layers
from megatron_vp.jobs.pattern_text import pattern_in
from megatron_vp.mcore.model.chunk_layout import even_layout
from megatron_vp.mcore.settled import SettledJob, placed_as_megatron
from megatron_vp.runtime.groups import from_all, pipeline_device
from megatron_vp.schedule.placement import Placement

_LAYERS = "decoder.layers."


def plain_settings(job: SettledJob) -> dict[str, Any]:
    """How plain Megatron would split the model over the same ranks: the settings that differ from ours, under the names
    that Megatron's arguments and model configurations share.
    """
    args = job.arguments
    chunks, ranks = args.virtual_pipeline_model_parallel_size or 1, args.pipeline_model_parallel_size
    joined = chunks if job.settings.places_chunks else 1
    layout, pattern = job.given.pipeline_model_parallel_layout, args.hybrid_layer_pattern
    if pattern is None:
        layout = layout or even_layout(args.num_layers, chunks * ranks, args.mtp_num_layers or 0)
        segments = PipelineParallelLayerLayout.parse_str_to_list(layout)
        layout = PipelineParallelLayerLayout([list(chain(*part)) for part in batched(segments, joined)], ranks)
    else:
        given = pattern_in(vars(job.given))
        if given is not None and given.layers is None and "|" in pattern:
            pattern = given.with_bars(even_layers(len(given.letters), chunks * ranks))
        main, *heads = pattern.split("/")
        layout, pattern = None, "/".join(["|".join(map("".join, batched(main.split("|"), joined))), *heads])
    return {
        "virtual_pipeline_model_parallel_size": chunks // joined if chunks > joined else None,
        "pipeline_model_parallel_layout": layout,
        "hybrid_layer_pattern": pattern,
    }


BuildPlain = Callable[..., nn.Module]
"""Builds a chunk as Megatron would, given `pre_process`, `post_process` and, with several chunks per rank, `vp_stage`.
"""


Fill = Callable[[Sequence[nn.Module]], None]
"""Overwrites the weights of this rank's new chunks with plain Megatron's initial weights, and frees plain Megatron's
chunks. All ranks of a model replica call it once, when all chunks are built. A parameter that does not exist in plain
Megatron keeps its own initial value.
"""


def plain_start(job: SettledJob, groups: ProcessGroupCollection, build: BuildPlain, config: Any) -> Fill | None:
    """Build the chunks that this rank would have in plain Megatron, or return None if our chunks do not need their
    weights. `config`: the configuration that `build` reads, unless it reads Megatron's arguments.

    All ranks of a model replica make this call before the first chunk is built. The weights are not needed in a replay,
    or with --init-model-with-meta-device. They are also not needed if a checkpoint replaces them, or if every layer is
    on the same rank as in plain Megatron.
    """
    if not moves_layers(job) or job.arguments.init_model_with_meta_device or job.arguments.fake_process_group:
        return None
    # Nodes may see different files. The ranks exchange the weights, so all ranks or none must build them.
    if all(from_all(job.checkpoint_to_load is not None, groups.mp)):
        return None
    settings = plain_settings(job)
    chunks = settings["virtual_pipeline_model_parallel_size"]
    plain, held = Placement.round_robin(groups.pp.size(), chunks or 1), []
    with _as_in_plain_megatron(job.args, config, settings):
        for index, stage in enumerate(plain.stage_of[groups.pp.rank()]):
            ends = {"pre_process": stage == 0, "post_process": stage + 1 == plain.stages}
            held.append(dict(_tensors(build(**ends, **({"vp_stage": index} if chunks else {})))))
    return partial(_fill, groups, plain, held, job.placement)


@torch.no_grad()
def _fill(
    groups: ProcessGroupCollection,
    plain: Placement,
    held: list[dict[str, torch.Tensor]],
    ours: Placement,
    chunks: Sequence[nn.Module],
) -> None:
    """See `Fill`. `held`: the tensors of each chunk that this rank would have in plain Megatron."""
    # Broadcast over the model-parallel group, because the gradient norm needs this group's connections anyway. Its
    # ranks are ordered by pipeline rank, then by tensor rank.
    group, tensor_size, device = groups.mp, groups.tp.size(), pipeline_device()
    own = [dict(_tensors(chunk)) for chunk in chunks]
    holdings = from_all([{name: _form(each) for name, each in tensors.items()} for tensors in held], group)
    # Of the plain stages that hold a tensor, take the one nearest to our stage.
    nearest: dict[tuple[int, str], int] = {}
    for stage, tensor_rank in product(range(plain.stages), range(tensor_size)):
        source, chunk = plain.rank_of(stage) * tensor_size + tensor_rank, plain.chunk_of(stage)
        for name, (shape, dtype) in holdings[source][chunk].items():
            if dist.get_rank(group) == source:
                value = _exact(held[chunk][name]).to(device).contiguous()
            else:
                value = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(value, src=dist.get_global_rank(group, source), group=group)
            for index, of in enumerate(ours.stage_of[groups.pp.rank()] if tensor_rank == groups.tp.rank() else ()):
                distance = abs(stage - of * plain.stages // ours.stages)
                same_form = name in own[index] and _form(own[index][name]) == (shape, dtype)
                if same_form and distance < nearest.get((index, name), plain.stages):
                    nearest[index, name] = distance
                    _set(own[index][name], value)
    held.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # Gradient buffers do not fit into the cached blocks.


def moves_layers(job: SettledJob) -> bool:
    """Whether some layers are on different ranks than in plain Megatron."""
    args, plain = job.arguments, plain_settings(job)
    if job.settings.places_chunks:
        return True
    if args.hybrid_layer_pattern is not None:
        return args.hybrid_layer_pattern != plain["hybrid_layer_pattern"]
    if args.pipeline_model_parallel_layout is None:
        return False
    ours = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
    return ours.layout != plain["pipeline_model_parallel_layout"].layout


@contextmanager
def _as_in_plain_megatron(args: Any, config: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Inside this context, Megatron's arguments and state and a model's configuration have plain Megatron's settings.
    `args` and `config` may be None.
    """
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    with ExitStack() as stack:
        for each, (name, value) in product((args, config), settings.items()):
            if hasattr(each, name):
                stack.callback(setattr, each, name, getattr(each, name))
                setattr(each, name, value)
        stack.callback(parallel_state.set_virtual_pipeline_model_parallel_world_size, chunks)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(settings["virtual_pipeline_model_parallel_size"])
        stack.enter_context(placed_as_megatron(settings))
        yield


def _tensors(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a chunk, under names that do not depend on the chunk that holds them."""
    for named in (chunk.named_parameters(), chunk.named_buffers()):
        for name, tensor in named:
            yield _global_name(chunk, name), tensor


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """The initial values before rounding; an fp8 weight keeps these values in addition to the rounded ones."""
    drawn = tensor.get_high_precision_init_val() if hasattr(tensor, "get_high_precision_init_val") else None
    return (tensor if drawn is None else drawn).detach()


def _set(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite a tensor and, for an fp8 weight, also the unrounded values from which master weights are made."""
    if not hasattr(tensor, "get_high_precision_init_val"):
        tensor.copy_(value)
        return
    if (largest := getattr(tensor._quantizer, "amax", None)) is not None:
        largest.zero_()  # Discard the amax of the old values.
    tensor.copy_(value)
    tensor.get_high_precision_init_val().copy_(value)


def _global_name(chunk: nn.Module, name: str) -> str:
    """A tensor's name, with its layer numbered within the whole model."""
    if not name.startswith(_LAYERS):
        return name
    index, _, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{chunk.decoder.layers[int(index)].layer_number - 1}.{rest}"


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
