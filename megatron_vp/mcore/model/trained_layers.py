"""Lets all ranks of a model agree on which vocabulary layers are trained.

As in Megatron, a weight is trained if its `requires_grad` is True, which may change until the model is wrapped. A
vocabulary layer that is frozen before it is split has frozen shards on all ranks (see `surgery`). If a vocabulary layer
is frozen later, each rank freezes its own shard, so ranks could disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.model_check import adapted
from megatron_vp.mcore.model.surgery import (
    GROUP_ATTRIBUTE,
    ShardedOutputLayer,
    ShardedWordEmbedding,
    vocab_shards,
)
from megatron_vp.mcore.settled import SettledJob
from megatron_vp.runtime.collectives import LayerShards
from megatron_vp.vocab.loss import TokenLoss

EMBEDDING, OUTPUT = "embedding.word_embeddings", "output_layer"

_AGREED = "vocabulary_parallel_training"
"""Attribute in which a wrapped chunk keeps its rank's `_Shards` and the `Trained` on which all ranks agreed."""


@dataclass(frozen=True)
class Trained:
    """For each vocabulary layer, whether it is trained; always True if it is not split into shards."""

    embedding: bool
    output: bool


@dataclass(frozen=True)
class _Shards:
    """One rank's report on its vocabulary shards.

    trained: by layer name, whether the layer's weight requires gradients; only for layers of which the rank holds rows.
    adapter: the error message if another layer has replaced a shard; else None.
    """

    trained: dict[str, bool]
    adapter: str | None = None


def agreed(job: SettledJob, wrapped: nn.Module, chunks: Sequence[nn.Module], *, alone: bool) -> Trained:
    """Agree with all ranks of a model on which vocabulary layers are trained.

    Args:
        wrapped: the first chunk as the script passes it to Megatron's forward-backward function. The agreement is
            stored on this chunk, so a newly wrapped model needs a new agreement.
        alone: whether this is a replay, in which the rank has no peers.

    The first call for a model is collective over its ranks. Raises UserError if a vocabulary layer is frozen on only
    some ranks, was frozen or unfrozen after the first call, or has an adapter.
    """
    own = _shards(job, chunks)
    before: tuple[_Shards, Trained] | None = getattr(wrapped, _AGREED, None)
    if before is None:
        before = own, _ask(chunks, own, alone)
        setattr(wrapped, _AGREED, before)
    if own != before[0]:
        raise UserError(
            "this script froze or unfroze a vocabulary layer after the first training iteration, when Megatron's "
            "gradient buffers and optimizer can no longer change: freeze layers before the model is wrapped for data "
            "parallelism, or wrap the model again and create a new optimizer"
        )
    return before[1]


def layer_shards(job: SettledJob, chunks: Sequence[nn.Module], trained: Trained) -> LayerShards | None:
    """The rank's vocabulary shards, and the token loss that the arguments select; None without --vocab-parallel."""
    if not job.settings.vocab_parallel:
        return None
    first, last = _ends(job, chunks)
    output = getattr(last, "output_layer", None)
    embedding = None if output is None else first.embedding.word_embeddings
    loss = TokenLoss(job.args.vocab_label_smoothing, job.args.vocab_z_loss)
    return LayerShards(vocab_shards(job, first), embedding, output, loss, trained.embedding, trained.output)


def _ends(job: SettledJob, chunks: Sequence[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The chunks that hold a rank's shards of the embedding and of the output layer."""
    placement = job.placement
    return chunks[placement.chunk_of(0)], chunks[placement.chunk_of(placement.stages - 1)]


def _shards(job: SettledJob, chunks: Sequence[nn.Module]) -> _Shards:
    if not job.settings.vocab_parallel:
        return _Shards({})
    first, last = _ends(job, chunks)
    embedding = getattr(first, "embedding", None)
    words = None if embedding is None else embedding.word_embeddings
    trained = {}
    for name, layer in ((EMBEDDING, words), (OUTPUT, getattr(last, "output_layer", None))):
        if layer is None or type(layer) is nn.Identity:
            continue
        added = [each for each, _ in layer.named_parameters() if each != "weight"]
        if type(layer) not in (ShardedWordEmbedding, ShardedOutputLayer) or added:
            return _Shards({}, adapted(name, layer))
        trained[name] = layer.weight.requires_grad
    return _Shards(trained)


def _ask(chunks: Sequence[nn.Module], own: _Shards, alone: bool) -> Trained:
    ranks = [own]
    if not alone:
        group = getattr(chunks[0], GROUP_ATTRIBUTE)
        ranks *= group.size()
        dist.all_gather_object(ranks, own, group=group)
    return Trained(_trains(EMBEDDING, ranks), _trains(OUTPUT, ranks))


def _trains(name: str, ranks: Sequence[_Shards]) -> bool:
    """Whether the ranks train the vocabulary layer `name`. Raises UserError if only some of them do, or if any
    vocabulary layer has an adapter.
    """
    adapters = [held.adapter for held in ranks if held.adapter is not None]
    if adapters:
        raise UserError(adapters[0])
    said = {rank: held.trained[name] for rank, held in enumerate(ranks) if name in held.trained}
    frozen = [rank for rank, trained in said.items() if not trained]
    if frozen and len(frozen) < len(said):
        raise UserError(
            f"--vocab-parallel splits the weight of {name} among {len(said)} ranks, but it is frozen only on "
            f"model-parallel rank{'s' * (len(frozen) > 1)} {', '.join(map(str, frozen))}: freeze it on all ranks or on "
            "none, and in the code that freezes it, check the parameter's name instead of pre_process or post_process"
        )
    return not frozen
