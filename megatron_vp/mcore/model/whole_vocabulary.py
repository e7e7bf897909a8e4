"""The export view: a context in which the model has unsharded vocabulary layers, as in plain Megatron.

Exporters, conversion tools and post-training frameworks expect one embedding on the first stage and one output layer on
the last, each split only over that stage's tensor ranks. A chunk therefore keeps the vocabulary layers that Megatron
built for it, but not their rows. The view puts these layers back in place of the shards, fills them with the rows of
all ranks, and can write changed rows back to the shards. Exporters may keep the layers between two views: outside of a
view, the weights still have their shapes, but all of their entries are one NaN.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_vp.mcore.settled import MODEL
from megatron_vp.runtime.groups import from_all, pipeline_device

_ENDS = ("pre_process", "post_process", "share_embeddings_and_output_weights")


class WholeLayers:
    """Keeps the vocabulary layers that Megatron built for a chunk, and frees their rows.

    Create an instance before the layers are split, and call `release` after the split.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self.chunk = chunk
        self.tied = chunk.share_embeddings_and_output_weights
        self._ends = {name: getattr(chunk, name) for name in _ENDS}
        self.embedding = chunk.embedding.word_embeddings if chunk.pre_process else None
        self.output_layer = chunk.output_layer if chunk.post_process else None

    def release(self) -> None:
        """Free the rows, but keep the shape, and the attributes that Megatron attached to the parameters."""
        for layer in filter(None, (self.embedding, self.output_layer)):
            layer.weight.data = layer.weight.new_full((), torch.nan).expand(layer.weight.shape)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the unsharded layers in place of the shards, inside this context."""
        chunk, parts = self.chunk, self.chunk._modules
        inner = parts if self.embedding is None else chunk.embedding._modules
        # The patches restore the order of modules and parameters, too.
        with mock.patch.dict(parts), mock.patch.dict(inner), mock.patch.multiple(chunk, **self._ends):
            if self.embedding is None:
                parts.pop("embedding", None)
            else:
                chunk.embedding.word_embeddings = self.embedding
            if self.output_layer is None:
                parts.pop("output_layer", None)
            else:
                chunk.output_layer = self.output_layer
            try:
                yield
            finally:
                self.release()


@contextmanager
def whole_vocabulary(model: nn.Module | Sequence[nn.Module], write: bool = False) -> Iterator[None]:
    """See `megatron_vp.whole_vocabulary`."""
    built = _split(model)
    if built is None:
        yield
        return
    embeddings, outputs = [each.embedding for each in built.whole], [each.output_layer for each in built.whole]
    weights = [(embeddings, built.shards["embedding"]), (outputs, built.shards["output"])]
    if built.whole[0].tied:  # The embedding is written back.
        weights = [([*embeddings, *outputs], built.shards["embedding"])]
    with ExitStack() as stack:
        if not built.shown:  # Otherwise, an enclosing call has already made the layers whole.
            stack.enter_context(mock.patch.object(built, "shown", True))
            for whole in built.whole:
                stack.enter_context(whole.in_place())
            layout, config = built.job.arguments.pipeline_model_parallel_layout, built.chunks[0].config
            if layout is not None and config.pipeline_model_parallel_layout is None:
                # A script's own configuration has no layout, but exporters may number layers by it.
                layout = PipelineParallelLayerLayout.from_str(layout, built.groups.pp.size())
                stack.enter_context(mock.patch.object(config, "pipeline_model_parallel_layout", layout))
            for layers, shard in weights:
                _fill(layers, shard, built)
        yield
        if write:
            for layers, shard in weights:
                _write(layers[: len(embeddings)], shard, built)


def _model_of(model: nn.Module | Sequence[nn.Module]) -> Any:
    """The `RankModel` of a model's chunks; None for other models."""
    return getattr(unwrap_model(model[0] if isinstance(model, Sequence) else model), MODEL, None)


def _split(model: nn.Module | Sequence[nn.Module]) -> Any:
    """The `RankModel` of chunks whose vocabulary layers are split; None for other chunks."""
    built = _model_of(model)
    return built if built is not None and built.whole else None


def _fill(layers: Sequence[nn.Module | None], shard: nn.Module | None, built: Any) -> None:
    """Fill this rank's `layers`, some None, with the rows that plain Megatron gives to this tensor rank."""
    filled, rows, group = list(filter(None, layers)), built.rows, built.groups.mp
    rank, part = dist.get_rank(group), rows.vocab_size // rows.tensor
    first = rank % rows.tensor * part
    wanted = range(first, first + part) if filled else range(0)
    whole_vh, _ = moved_rows(None if shard is None else shard.weight, rows.start(rank), wanted, group)
    for layer in filled:
        layer.weight.data = whole_vh


@torch.no_grad()
def _write(layers: Sequence[nn.Module | None], shard: nn.Module | None, built: Any) -> None:
    """The inverse of `_fill`: copy this rank's rows to its shard from the layers of all ranks."""
    rows, group, part_vh = built.rows, built.groups.mp, next((each.weight for each in layers if each is not None), None)
    rank = dist.get_rank(group)
    start = rank % rows.tensor * (rows.vocab_size // rows.tensor)
    own_vh, _ = moved_rows(part_vh, start, range(rows.start(rank), rows.start(rank + 1)), group)
    if shard is not None:
        shard.weight.copy_(own_vh)


def moved_rows(
    own_vh: torch.Tensor | None, start: int, wanted: range, group: dist.ProcessGroup
) -> tuple[torch.Tensor, bool]:
    """Return the rows `wanted` of a weight [V, h] of which each rank of `group` holds a part, and whether the weight is
    trained. The call is collective over `group`.

    Each part is broadcast over the model-parallel group, whose connections training needs anyway. A scatter or
    point-to-point messages would open further connections, which would stay open as long as the job runs.

    Args:
        own_vh: this rank's part, which may be on another device than the pipeline's; None if it has none.
        start: the number of rows in front of this part.
    """
    ranks, rank, device = dist.get_process_group_ranks(group), dist.get_rank(group), pipeline_device()
    # Scripts may have frozen or converted the weight since its configuration was made, so its holders say what it is.
    own = None if own_vh is None else (start, *own_vh.shape, own_vh.dtype, own_vh.requires_grad)
    parts = from_all(own, group)
    _, _, width, dtype, trained = next(filter(None, parts))
    wanted_vh = torch.empty(len(wanted), width, dtype=dtype, device=device)
    for root, part in enumerate(parts):
        if part is None:
            continue
        first, count, *_ = part
        part_kh = own_vh.detach().to(device) if root == rank else torch.empty(count, width, dtype=dtype, device=device)
        dist.broadcast(part_kh, src=ranks[root], group=group)
        low, high = max(first, wanted.start), min(first + count, wanted.stop)
        if low < high:
            wanted_vh[low - wanted.start : high - wanted.start] = part_kh[low - first : high - first]
    return wanted_vh, trained


def _viewing(original: Callable[..., Any], write: bool = False) -> Callable[..., Any]:
    """Wrap a method of Megatron-Bridge so that it finds the model's vocabulary layers unsharded. If the method yields
    weights, the layers stay unsharded until it has finished. `write`: whether it changes them.
    """
    signature = inspect.signature(original)

    @wraps(original)
    def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with whole_vocabulary(signature.bind(*args, **kwargs).arguments["megatron_model"]):
            yield from original(*args, **kwargs)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with whole_vocabulary(signature.bind(*args, **kwargs).arguments["megatron_model"], write):
            return original(*args, **kwargs)

    return stream if inspect.isgeneratorfunction(original) else call


_loading = partial(_viewing, write=True)


def _tying_by_stage(original: Callable[..., None]) -> Callable[..., None]:
    """Let Megatron-Bridge copy a loaded tied weight to the last rank only if that rank has an output layer."""

    @wraps(original)
    def broadcast_shared_embeddings(self: Any, megatron_model: nn.Module | Sequence[nn.Module]) -> None:
        built = _model_of(megatron_model)
        if built is None or built.job.placement.last_rank + 1 == built.job.placement.ranks:
            original(self, megatron_model)
        # If the last stage is on another rank, no copy is needed, because the shards of a tied weight are cut from the
        # embedding.

    return broadcast_shared_embeddings
