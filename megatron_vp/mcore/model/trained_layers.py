"""Lets all ranks of a model agree on what is trained: which vocabulary layers, and what fraction of the other weights.

As in Megatron, a weight is trained if its `requires_grad` is True, which may change until the model is wrapped. A
vocabulary layer that is frozen before it is split has frozen shards on all ranks (see `surgery`). If a vocabulary layer
is frozen later, each rank freezes its own shard, so ranks could disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.training.utils import print_rank_0
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.model.model_check import adapted
from megatron_vp.mcore.model.surgery import (
    GROUP_ATTRIBUTE,
    ReceivedWords,
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
    """Which part of a model is trained.

    embedding, output: for each of these layers, whether it is trained; always True if it is not split into shards.
    weights: the trained fraction of each virtual stage's weight matrices, not counting embeddings and vocabulary
    shards.
    """

    embedding: bool
    output: bool
    weights: tuple[float, ...]

    @property
    def everything(self) -> bool:
        """Whether nothing is frozen."""
        return self.embedding and self.output and min(self.weights) == 1


@dataclass(frozen=True)
class _Shards:
    """One rank's report on its vocabulary shards.

    trained: by layer name, whether the layer's weight requires gradients; only for layers of which the rank holds rows.
    adapter: the error message if another layer has replaced a shard; else None.
    """

    trained: dict[str, bool]
    adapter: str | None = None


def agreed(job: SettledJob, wrapped: nn.Module, chunks: Sequence[nn.Module], *, alone: bool) -> Trained:
    """Agree with all ranks of a model on what is trained (see `Trained`).

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
        before = own, _ask(job, chunks, own, alone)
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
        if layer is None or type(layer) is ReceivedWords:
            continue
        added = [each for each, _ in layer.named_parameters() if each != "weight"]
        if type(layer) not in (ShardedWordEmbedding, ShardedOutputLayer) or added:
            return _Shards({}, adapted(name, layer))
        trained[name] = layer.weight.requires_grad
    return _Shards(trained)


def _ask(job: SettledJob, chunks: Sequence[nn.Module], own: _Shards, alone: bool) -> Trained:
    parts = tuple(map(_trained_part, chunks))
    if alone:
        return Trained(own.trained.get(EMBEDDING, True), own.trained.get(OUTPUT, True), parts)
    group = getattr(chunks[0], GROUP_ATTRIBUTE)
    ranks: list[tuple[_Shards, tuple[float, ...]]] = [(own, parts)] * group.size()
    dist.all_gather_object(ranks, (own, parts), group=group)
    shards = [said for said, _ in ranks]
    # The group is ordered by pipeline rank, then by tensor rank. Tensor ranks of a stage hold parts of the same
    # matrices, so the report of one of them is enough.
    by_stage = {}
    for stages, (_, rank_parts) in zip(
        job.placement.stage_of, ranks[:: job.args.tensor_model_parallel_size], strict=True
    ):
        by_stage |= dict(zip(stages, rank_parts, strict=True))
    trained = Trained(
        _trains(EMBEDDING, shards), _trains(OUTPUT, shards), tuple(by_stage[each] for each in sorted(by_stage))
    )
    if not trained.everything:
        frozen = [name for name, trains in ((EMBEDDING, trained.embedding), (OUTPUT, trained.output)) if not trains]
        if min(trained.weights) < 1:
            share = 1 - sum(trained.weights) / len(trained.weights)
            frozen.append(f"{100 * share:.0f} % of the weights between the vocabulary layers")
        print_rank_0(f"> frozen: {', '.join(frozen)}; the schedule takes this into account")
    return trained


def _trained_part(chunk: nn.Module) -> float:
    """The trained fraction of the elements in a chunk's weight matrices; 1 if the chunk has no matrices."""
    whole = trained = 0
    for name, parameter in chunk.named_parameters():
        looked_up = name.startswith("embedding.")
        # Without `post_process`, the output layer is a shard, and pass T computes its weight gradient.
        elsewhere = name.startswith("output_layer.") and not chunk.post_process
        if parameter.dim() > 1 and not looked_up and not elsewhere:
            whole += parameter.numel()
            trained += parameter.numel() * parameter.requires_grad
    return trained / whole if whole else 1.0


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
