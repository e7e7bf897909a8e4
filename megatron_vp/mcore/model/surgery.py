"""Splits the vocabulary layers of a model's chunks over all ranks, with --vocab-parallel.

Megatron first builds the layers as usual: the word embedding is split over the tensor ranks of the first stage, and the
output layer over the tensor ranks of the last stage. Then the rows of both layers are spread over all pipeline and
tensor ranks, and shards replace the layers under Megatron's own names. Training therefore starts from exactly the
weights of plain Megatron, and a layer that is frozen by then has frozen shards on all ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_pg_rank
from torch import nn

from megatron_vp.mcore.model.model_check import softcap_of
from megatron_vp.mcore.model.multi_token import attach_mtp_block
from megatron_vp.mcore.model.whole_vocabulary import moved_rows
from megatron_vp.mcore.settled import SettledJob, process
from megatron_vp.runtime.groups import PipelineGroups, from_all, pipeline_device
from megatron_vp.runtime.pipeline import Pipeline
from megatron_vp.runtime.watchdog import Watchdog
from megatron_vp.schedule.transfers import all_edges
from megatron_vp.vocab.embedding import EmbeddingLayer, RowExchange
from megatron_vp.vocab.output import OutputLayer
from megatron_vp.vocab.shards import VocabShards


def _sharded_weight(
    layer: EmbeddingLayer | OutputLayer, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
) -> dict[str, Any]:
    """The shard as rows of one global tensor, under the key that plain Megatron uses."""
    shards, weight = layer.shards, layer.weight
    key = f"{prefix}weight"
    return {
        key: ShardedTensor(
            key=key,
            # Pass the parameter itself: Megatron's optimizer compares `data` with its parameters by object identity.
            data=weight,
            dtype=weight.dtype,
            local_shape=tuple(weight.shape),
            global_shape=(shards.vocab_size, weight.shape[1]),
            global_offset=(shards.start(layer.index), 0),
            axis_fragmentations=(shards.count, 1) if shards.alike else None,
            replica_id=(0, 0, get_pg_rank(metadata["dp_cp_group"])),
            allow_shape_mismatch=True,
        )
    }


class ShardedWordEmbedding(EmbeddingLayer):
    """A shard of the word embedding that takes the place of Megatron's `word_embeddings`."""

    def forward(self, words: RowExchange | torch.Tensor) -> torch.Tensor:
        """Look up rows, or return finished embeddings [b, s, h] unchanged.

        On virtual stage 0, our schedules assemble the embeddings from all ranks and give them to Megatron's
        `LanguageModelEmbedding`, which does everything after the look-up (position embeddings, transposition, dropout).
        """
        return words if isinstance(words, torch.Tensor) else super().forward(words)

    sharded_state_dict = _sharded_weight


class ShardedOutputLayer(OutputLayer):
    """A shard of the output layer that takes the place of Megatron's `output_layer`.

    Like Megatron's layer, the shard has an empty extra state, because checkpoints of hybrid models have an entry for
    it.
    """

    def __init__(self, weight: nn.Parameter, shards: VocabShards, index: int, tied: bool, softcap: float = 0.0) -> None:
        super().__init__(weight, shards, index, softcap)
        self.tied = tied
        if tied:
            # The parameter is registered only in the embedding, which may be in another chunk, so that the optimizer,
            # gradient buckets and checkpoints contain it once. S reads the updated weight, because Megatron gathers it
            # before the embedding's pass IF, which precedes S.
            del self.weight
            object.__setattr__(self, "weight", weight)
        self._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.setdefault(f"{prefix}_extra_state"))

    def get_extra_state(self) -> None:
        """Return None, because the extra state is empty."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state, which is empty."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The shard as rows of one global tensor; a tied weight is saved with the embedding, as in plain Megatron."""
        first = self.shards.holders[0] * self.shards.tensor
        replica = (0, self.index - first, get_pg_rank(metadata["dp_cp_group"]))
        extra = make_sharded_object_for_checkpoint(None, f"{prefix}_extra_state", replica_id=replica)
        weight = {} if self.tied else _sharded_weight(self, prefix, sharded_offsets, metadata)
        return {**weight, f"{prefix}_extra_state": extra}


def split_vocabulary(built: Any, index: int) -> None:
    """Remove the vocabulary layers of a rank's chunk, if it has any, and attach this rank's shards of these layers.
    `built` is the rank's `RankModel`, whose `shards` this function sets. The call is collective over all ranks; each
    rank splits its chunks in order.

    The embedding's shard goes into the chunk that has the same index as the first stage's chunk, and the output layer's
    shard goes into the chunk that has the same index as the last stage's chunk. A rank without vocabulary rows has no
    shards.
    """
    chunk, shards, placement = built.chunks[index], built.rows, built.job.placement
    if getattr(chunk, "mtp_process", False):
        attach_mtp_block(chunk)
    # Megatron orders this group by pipeline rank, then by tensor rank; the shards have the same order.
    rank = dist.get_rank(built.groups.mp)
    holds_rows = rank // shards.tensor in shards.holders
    tied = chunk.share_embeddings_and_output_weights
    if index == placement.chunk_of(0):
        part = chunk.embedding.word_embeddings.weight if chunk.pre_process else None
        weight = _shard(built, part, chunk)
        # A rank with virtual stage 0 but no rows passes on the embeddings that other ranks have looked up.
        word_embeddings = ShardedWordEmbedding(weight, shards, rank) if holds_rows else nn.Identity()
        if chunk.pre_process:
            chunk.embedding.word_embeddings = word_embeddings
            # Every tensor rank receives the embeddings of the whole sequence; Megatron splits the sequence after adding
            # position embeddings.
            chunk.embedding.reduce_scatter_embeddings = False
        elif holds_rows:
            chunk.embedding = MegatronModule(chunk.config)  # Provides the module path of the weight.
            chunk.embedding.word_embeddings = word_embeddings
        built.shards["embedding"] = word_embeddings if holds_rows else None
    if index == placement.chunk_of(placement.stages - 1):
        if tied:
            weight = built.chunks[0].embedding.word_embeddings.weight if holds_rows else None
        else:
            part = chunk.output_layer.weight if chunk.post_process else None
            weight = _shard(built, part, chunk)
        if holds_rows:
            chunk.output_layer = ShardedOutputLayer(weight, shards, rank, tied, softcap_of(chunk.config))
        elif chunk.post_process:
            del chunk.output_layer
        built.shards["output"] = chunk.output_layer if holds_rows else None
    if chunk.post_process and chunk.config.use_mup:
        # Megatron would scale the logits, but no rank holds all of them; scaling the hidden states has the same effect.
        chunk.register_forward_hook(lambda last, _inputs, hidden_sbh: last._scale_logits(hidden_sbh))
    # The decoder keeps its own post_process: the final norm belongs to the last stage and is applied there.
    chunk.pre_process = chunk.post_process = chunk.decoder.pre_process = False
    # If sharing stayed on, Megatron would all-reduce the tied weight's gradient between the first and the last rank,
    # although these ranks now hold different rows.
    chunk.share_embeddings_and_output_weights = False


def create_pipeline(job: SettledJob, groups: ProcessGroupCollection, vocab_members: tuple[int, ...] | None) -> Pipeline:
    """Connect this rank with the other ranks of its pipeline. The call is collective over all ranks of the job. Models
    that have the same connections share them.
    """
    args, edges = job.arguments, all_edges(job.placement, job.settings.vocab_parallel)
    connections = groups.mp, tuple(sorted(edges)), vocab_members
    if connections in process.pipelines:
        return process.pipelines[connections]
    first = 60 * args.distributed_timeout_minutes
    later = args.distributed_timeout_seconds_after_init or first
    # Give the backend a longer limit, so that the watchdog acts first and its report names the current instruction. The
    # backend's limit counts from the launch of an operation, possibly several microbatches before its execution.
    backend_limit = timedelta(seconds=1.1 * first)
    # For every model replica of the job, its global ranks in the order of their vocabulary shards.
    replicas = sorted(set(from_all(tuple(dist.get_process_group_ranks(groups.mp)))))
    sizes, gloo = (groups.tp.size(), vocab_members), args.use_gloo_process_groups is not False
    pipeline = Pipeline(PipelineGroups.create(replicas, edges, backend_limit, *sizes, gloo=gloo))
    if not pipeline.groups.alone:  # A rank without peers has no launcher, and so no store.
        Watchdog(pipeline.progress, first, later).start()
    process.pipelines[connections] = pipeline
    return pipeline


@torch.no_grad()
def _shard(built: Any, part_vh: nn.Parameter | None, chunk: nn.Module) -> nn.Parameter:
    """Distribute the rows of a weight [V, h] from the tensor ranks of a stage, which pass their parts, to all ranks.

    Returns this rank's shard, on the device of the chunk's parameters, with the attributes that Megatron sets on
    parameters. The shard is frozen if the whole weight is frozen.
    """
    shards, groups, config, device = built.rows, built.groups, chunk.config, pipeline_device()
    rank = dist.get_rank(groups.mp)
    if built.job.arguments.fake_process_group:  # A replayed rank has no peers to receive rows from.
        trained = part_vh is None or part_vh.requires_grad
        dtype = config.params_dtype if part_vh is None else part_vh.dtype
        own_vh = torch.empty(shards.rows(rank), config.hidden_size, dtype=dtype, device=device)
        config.init_method(own_vh)
    else:
        start = 0 if part_vh is None else groups.tp.rank() * len(part_vh)
        own_vh, trained = moved_rows(part_vh, start, range(shards.start(rank), shards.start(rank + 1)), groups.mp)
    home = next((each.device for each in chunk.parameters()), device)
    weight = nn.Parameter(own_vh.to(home), requires_grad=trained)
    # No other rank holds these rows, so every rank counts its own rows in the gradient norm and in the number of zeros.
    tensor_parallel.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    weight.is_embedding_or_output_parameter = True
    if config.use_mup:
        weight.is_embedding_parameter = True
    return weight
