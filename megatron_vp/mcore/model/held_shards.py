"""The shards that a rank's finished model holds, and that all its ranks agree on which vocabulary layers are trained.

`requires_grad` of a weight decides, as in Megatron, at any time before the model is wrapped. A layer that is frozen
before it is cut has frozen shards on all ranks (`surgery`). What freezes layers afterwards, a hook or the lines of a
script, runs on every rank for itself, and finds a shard under Megatron's name on all ranks that hold rows.
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
"""Where a wrapped chunk keeps what its rank said of itself, and what all ranks agreed on."""


@dataclass(frozen=True)
class _Held:
    """What one rank says of its model.

    trained: whether the weight takes gradients, by the names of the layers that the rank has rows of.
    adapter: why the model cannot be trained, where another layer is in the place of a shard; else None.
    """

    trained: dict[str, bool]
    adapter: str | None = None


def layer_shards(
    job: SettledJob, wrapped: nn.Module, chunks: Sequence[nn.Module], *, alone: bool
) -> LayerShards | None:
    """The shards of a rank's chunks and the loss that the arguments ask for; None without --vocab-parallel.

    Args:
        wrapped: the first chunk as the script hands it over. A model that is wrapped anew is asked anew.
        alone: the rank has no peers, in a replay.

    The first call for a model is collective over its ranks. Raises UserError for a layer that is frozen on some of
    them, or since the last call, and for an adapter on a vocabulary layer.
    """
    if not job.settings.vocab_parallel:
        return None
    placement = job.placement
    first, last = (chunks[placement.chunk_of(stage)] for stage in (0, placement.stages - 1))
    trained = _agreed(wrapped, chunks[0], _held(first, last), alone)
    output = getattr(last, "output_layer", None)
    embedding = None if output is None else first.embedding.word_embeddings
    loss = TokenLoss(job.args.vocab_label_smoothing, job.args.vocab_z_loss)
    trains = {"trains_embedding": trained[EMBEDDING], "trains_output": trained[OUTPUT]}
    return LayerShards(vocab_shards(job, first), embedding, output, loss, **trains)


def _held(first: nn.Module, last: nn.Module) -> _Held:
    """Of the chunks that hold the shards of the embedding and of the output layer."""
    embedding = getattr(first, "embedding", None)
    words = None if embedding is None else embedding.word_embeddings
    trained = {}
    for name, layer in ((EMBEDDING, words), (OUTPUT, getattr(last, "output_layer", None))):
        if layer is None or type(layer) is ReceivedWords:
            continue
        added = [each for each, _ in layer.named_parameters() if each != "weight"]
        if type(layer) not in (ShardedWordEmbedding, ShardedOutputLayer) or added:
            return _Held({}, adapted(name, layer))
        trained[name] = layer.weight.requires_grad
    return _Held(trained)


def _agreed(wrapped: nn.Module, first: nn.Module, held: _Held, alone: bool) -> dict[str, bool]:
    """Of both layers, whether the ranks of the model train them."""
    before: tuple[_Held, dict[str, bool]] | None = getattr(wrapped, _AGREED, None)
    if before is None:
        all_held: list[_Held] = [held]
        if not alone:
            group = getattr(first, GROUP_ATTRIBUTE)
            all_held *= group.size()
            dist.all_gather_object(all_held, held, group=group)
        before = held, {name: _trained(name, all_held) for name in (EMBEDDING, OUTPUT)}
        setattr(wrapped, _AGREED, before)
    if held != before[0]:
        raise UserError(
            "this script has frozen or thawed a vocabulary layer after its first iteration, which Megatron's gradient "
            "buffers and optimizer do not follow: do it before the model is wrapped, or wrap it and make its optimizer "
            "anew"
        )
    return before[1]


def _trained(name: str, ranks: Sequence[_Held]) -> bool:
    """Whether the ranks of a model train a layer. Raises UserError where they differ."""
    adapters = [held.adapter for held in ranks if held.adapter is not None]
    if adapters:
        raise UserError(adapters[0])
    said = {rank: held.trained[name] for rank, held in enumerate(ranks) if name in held.trained}
    frozen = [rank for rank, trained in said.items() if not trained]
    if frozen and len(frozen) < len(said):
        raise UserError(
            f"the weight of {name} is frozen on {len(frozen)} of {len(said)} ranks (model-parallel ranks "
            f"{', '.join(map(str, frozen))}), and --vocab-parallel has rows of it on all of them: freeze it on every "
            f"rank, by the name of its parameter and not by pre_process or post_process, or on none"
        )
    return not frozen
